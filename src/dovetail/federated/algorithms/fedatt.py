"""FedAtt: attentive aggregation, in which distant clients have more weight in each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dovetail.errors import expect
from dovetail.federated.algorithms.parameters import ParameterAware
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Update, Weights
from dovetail.runtime.seeds import derive_seed
from dovetail.trainers.strategies.nesting import Described


@dataclass(eq=False, repr=False)
class FedAtt(Described, ParameterAware):
    """w ← w − ε Σ a_k (w − w_k) + noise, for every tensor with a = softmax over clients of ‖w − w_k‖ (Ji et al., 2019).

    w − w_k is −Δ_k. The numbers of samples have no effect, not even in the mean of buffers. A tensor that no client has
    changed stays unchanged, without noise.

    Args:
        epsilon: ε, the step.
        magnitude: The standard deviation of the noise; 0 for none. It gives no differential privacy, for which the
            `gaussian_noise` postprocessor also clips updates.
        seed: The seed of the noise, with the number of the round: a repeated or resumed run has the same noise.

    Example:
        >>> from dovetail.federated.averaging import weighted_mean
        >>> updates = [Update(k, 1, 10, delta={"w": torch.tensor([1.0])}) for k in (1, 2)]
        >>> FedAtt(magnitude=0.0).aggregate({"w": torch.zeros(1)}, updates, weighted_mean)
        {'w': tensor([1.2000])}
    """

    epsilon: float = 1.2
    magnitude: float = 0.001
    seed: int = 0
    rounds: int = field(default=0, init=False)

    decides = ("how much each update counts", "how the server steps")
    needs_each_update = True
    saved = ("rounds",)

    def __post_init__(self) -> None:
        expect(self.epsilon > 0, "epsilon", "a number above 0", self.epsilon)
        expect(self.magnitude >= 0, "magnitude", "a number that is at least 0", self.magnitude)

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        self.rounds += 1
        own = [self.parameters_of(update.delta) for update in updates]
        norms = {name: torch.stack([delta[name].double().norm() for delta in own]) for name in own[0]}
        # a_k relative to 1/K, the weight of client k in the plain mean that `average` computes below.
        scales = {name: (torch.softmax(norm, dim=0) * len(updates)).tolist() for name, norm in norms.items()}
        alike = [
            replace(update, num_samples=1, delta={**update.delta, **_scaled(delta, scales, place)})
            for place, (update, delta) in enumerate(zip(updates, own, strict=True))
        ]
        mean = average(alike)
        steps = {name: self.epsilon * mean[name] for name in norms}
        changed = [name for name, norm in norms.items() if norm.any()]
        # One draw per changed tensor, in the order of the model's names, so that the noise is the same in a repeated
        # run.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "fedatt", self.rounds))
        for name in changed if self.magnitude else ():
            noise = torch.randn(steps[name].shape, generator=generator, dtype=steps[name].dtype)
            steps[name] = steps[name] + self.magnitude * noise.to(steps[name].device)
        return moved(weights, {**mean, **steps})


def _scaled(delta: Weights, scales: Mapping[str, list[float]], place: int) -> dict[str, Tensor]:
    return {name: change * scales[name][place] for name, change in delta.items()}
