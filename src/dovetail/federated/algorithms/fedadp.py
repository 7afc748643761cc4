"""FedAdp: the weight of an update depends on its angle to the mean update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dovetail.errors import expect
from dovetail.federated.algorithms.parameters import ParameterAware
from dovetail.federated.averaging import Average, moved, weighted_mean
from dovetail.federated.messages import Update, Weights
from dovetail.trainers.strategies.nesting import Described

# The exponential of a larger number overflows.
_MOST = 700.0


@dataclass(eq=False, repr=False)
class FedAdp(Described, ParameterAware):
    """w ← w + Σ ψ_k Δ_k, where ψ_k ∝ n_k exp(f(θ_k)) and θ_k is the angle to the mean update (Wu and Wang, 2021).

    The angle of a client is its mean over the rounds that the client took part in, and f(θ) = α (1 − exp(−exp(−α
    (θ − 1)))): near α for small angles, near 0 for large ones. An update of zeros has no direction, and counts as one
    at a right angle. Whole numbers are averaged by samples.

    Args:
        alpha: α: the larger, the faster the weight decreases with the angle, by a factor of at most e^α.

    Example:
        >>> import torch
        >>> from dovetail.federated.averaging import weighted_mean
        >>> deltas = [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.1])]
        >>> updates = [Update(k, 1, 10, delta={"w": delta}) for k, delta in enumerate(deltas, start=1)]
        >>> FedAdp().aggregate({"w": torch.zeros(2)}, updates, weighted_mean)["w"][0].item() > 0.99  # FedAvg: 0.33
        True
    """

    alpha: float = 5.0
    # The smoothed angle of every client, and of how many rounds it is the mean; by the client's id.
    angles: dict[str, float] = field(default_factory=dict, init=False)
    rounds: dict[str, int] = field(default_factory=dict, init=False)

    decides = ("how much each update counts",)
    needs_each_update = True
    saved = ("angles", "rounds")

    def __post_init__(self) -> None:
        expect(self.alpha > 0, "alpha", "a number above 0", self.alpha)

    def contribution(self, angle: float) -> float:
        """Return f(θ), from 0 to α."""
        return self.alpha * -math.expm1(-math.exp(min(self.alpha * (1 - angle), _MOST)))

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        mean = self.parameters_of(weighted_mean(updates))
        found = [self.contribution(self._smoothed(update, mean)) for update in updates]
        # Only ratios of the factors matter. With the largest exponent subtracted, no exponential overflows.
        factors = [math.exp(it - max(found)) for it in found]
        samples = [update.num_samples for update in updates]
        total = sum(n * factor for n, factor in zip(samples, factors, strict=True))
        # `average` multiplies by n_k / n, so a scale is ψ_k divided by n_k / n. Their mean by samples is 1.
        scales = [factor * sum(samples) / total if total else 1.0 for factor in factors]
        return moved(weights, average([_scaled(update, scale) for update, scale in zip(updates, scales, strict=True)]))

    def _smoothed(self, update: Update, mean: Weights) -> float:
        """Add the angle of an update to the mean of its client, and return the mean."""
        client, now = str(update.client_id), _angle(update.delta, mean)
        self.rounds[client] = rounds = self.rounds.get(client, 0) + 1
        self.angles[client] = angle = (self.angles.get(client, 0.0) * (rounds - 1) + now) / rounds
        return angle


def _angle(delta: Weights, mean: Weights) -> float:
    inner = sum(_inner(delta[name], value) for name, value in mean.items())
    norms = math.sqrt(sum(_inner(delta[name], delta[name]) for name in mean))
    norms *= math.sqrt(sum(_inner(value, value) for value in mean.values()))
    return math.acos(max(-1.0, min(1.0, inner / norms if norms else 0.0)))


def _inner(first: Tensor, second: Tensor) -> float:
    return (first.double() * second.double()).sum().item()


def _scaled(update: Update, scale: float) -> Update:
    delta = update.delta.items()
    return update.with_delta({name: value * scale if value.is_floating_point() else value for name, value in delta})
