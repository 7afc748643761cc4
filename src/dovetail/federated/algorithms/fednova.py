"""FedNova: normalized averaging, as if all clients had made the same number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dovetail.errors import expect
from dovetail.federated.algorithms.parameters import ParameterAware
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Update, Weights
from dovetail.trainers.strategies.nesting import Described


@dataclass(eq=False, repr=False)
class FedNova(Described, ParameterAware):
    """w ← w + τ_eff Σ p_k Δ_k / τ_k, with p_k = n_k / n and τ_eff = Σ p_k τ_k (Wang et al., 2020).

    τ_k are the optimizer steps that client k has really made, `update.num_updates`. A client that has made none has
    no direction, and is left out. Buffers, such as the statistics of BatchNorm, are averaged as they are.

    Args:
        momentum: ρ of the clients' SGD, which is reset in every round; not Nesterov's. τ_k is then replaced by the
            total weight of the gradients of τ_k steps, (τ_k − ρ (1 − ρ^τ_k) / (1 − ρ)) / (1 − ρ).

    Example:
        >>> import torch
        >>> from dovetail.federated.averaging import weighted_mean
        >>> updates = [Update(k, 1, 10, num_updates=k, delta={"w": torch.tensor(float(k))}) for k in (1, 2)]
        >>> FedNova().aggregate({"w": torch.tensor(0.0)}, updates, weighted_mean)  # 1.5 · (1/1 + 2/2) / 2
        {'w': tensor(1.5000)}
    """

    momentum: float = 0.0

    decides = ("how much each update counts",)
    needs_each_update = True

    def __post_init__(self) -> None:
        expect(0 <= self.momentum < 1, "momentum", "a number from 0 and below 1", self.momentum)

    def length(self, num_updates: int) -> float:
        """Return the total weight of the gradients of some steps: their number, or more with momentum."""
        rho = self.momentum
        return (num_updates - rho * (1 - rho**num_updates) / (1 - rho)) / (1 - rho)

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        counted = [update for update in updates if update.num_updates and update.num_samples]
        if not counted:
            return moved(weights, average(updates))
        lengths = [self.length(update.num_updates) for update in counted]
        samples = [update.num_samples for update in counted]
        # τ_eff. Each update is scaled by τ_eff / τ_k, and `average` multiplies it by p_k.
        effective = sum(n * length for n, length in zip(samples, lengths, strict=True)) / sum(samples)
        return moved(
            weights,
            average(
                [self._scaled(update, effective / length) for update, length in zip(counted, lengths, strict=True)]
            ),
        )

    def _scaled(self, update: Update, scale: float) -> Update:
        scaled = {name: change * scale for name, change in self.parameters_of(update.delta).items()}
        return update.with_delta({**update.delta, **scaled})
