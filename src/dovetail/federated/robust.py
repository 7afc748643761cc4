"""Robust aggregation: medians and means that a few malicious updates cannot move far."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import ConfigError, expect
from dovetail.federated.averaging import Average, weighted_mean
from dovetail.federated.messages import Update, Weights
from dovetail.federated.postprocess.clipping import clip, norm
from dovetail.federated.specs import build
from dovetail.registry import Registry

__all__ = [
    "CoordinateMedian",
    "GeometricMedian",
    "Krum",
    "NormBound",
    "RobustAverage",
    "TrimmedMean",
    "aggregators",
    "make_aggregator",
]

# A geometric median with a tolerance of 0 takes all the steps that it is given.
_MAX_ITERATIONS = 100_000


class RobustAverage(ABC):
    """Base of aggregators for updates of which some may be malicious.

    All updates have the same weight, because a client could claim any number of samples. The updates are finite and
    have the same tensors, because `dovetail.federated.validation` has checked them. The result has their types; whole
    numbers are rounded.
    """

    def __call__(self, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the aggregated difference."""
        if not updates:
            return {}
        first = updates[0].delta
        stacked = {name: torch.stack([update.delta[name] for update in updates]) for name in first}
        return {name: _cast_like(value, first[name]) for name, value in self.reduce(stacked).items()}

    @abstractmethod
    def reduce(self, stacked: Weights) -> Weights:
        """Return tensors without the first dimension, which counts the updates.

        Distances between updates leave out whole numbers, such as the number of batches that batch norm has seen.
        """


@dataclass(frozen=True)
class CoordinateMedian(RobustAverage):
    """The coordinate-wise median. It is robust if fewer than half of the updates are malicious.

    Example:
        >>> updates = [Update(k, 1, 1, delta={"w": torch.tensor([v])}) for k, v in enumerate((1.0, 2.0, 1e30))]
        >>> CoordinateMedian()(updates)
        {'w': tensor([2.])}
    """

    def reduce(self, stacked: Weights) -> dict[str, Tensor]:
        """Return the medians; for an even number of updates, the mean of the two in the middle."""
        return {name: _middle(value, (len(value) - 1) // 2) for name, value in stacked.items()}


@dataclass(frozen=True)
class TrimmedMean(RobustAverage):
    """The coordinate-wise mean without the largest and the smallest values.

    Args:
        share: The share of updates to leave out at either end, rounded down. It tolerates so many malicious updates.

    Example:
        >>> updates = [Update(k, 1, 1, delta={"w": torch.tensor([v])}) for k, v in enumerate((1.0, 2.0, 3.0, 1e30))]
        >>> TrimmedMean(share=0.25)(updates)
        {'w': tensor([2.5000])}
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        expect(0 <= self.share < 0.5, "share", "a number from 0 and below 0.5", self.share)

    def reduce(self, stacked: Weights) -> dict[str, Tensor]:
        # Without the addition, 0.29 * 100 = 28.999… would be rounded down to 28.
        return {name: _middle(value, int(self.share * len(value) + 1e-9)) for name, value in stacked.items()}


@dataclass(frozen=True)
class Krum(RobustAverage):
    """The update with the least distances to its neighbors, or the mean of several (Blanchard et al., 2017).

    Args:
        num_attackers: The largest number f of malicious updates; at least 2 f + 3 updates are needed.
        num_chosen: The number of updates in the mean. None means all but `num_attackers` (multi-Krum).

    Example:
        >>> values = (1.0, 1.1, 0.9, 1.2, 1e30)
        >>> updates = [Update(k, 1, 1, delta={"w": torch.tensor([v])}) for k, v in enumerate(values)]
        >>> Krum(num_attackers=1)(updates)
        {'w': tensor([1.])}
        >>> Krum(num_attackers=1, num_chosen=None)(updates)
        {'w': tensor([1.0500])}
    """

    num_attackers: int = 1
    num_chosen: int | None = 1

    def __post_init__(self) -> None:
        expect(self.num_attackers >= 0, "num_attackers", "a number that is not negative", self.num_attackers)
        if self.num_chosen is not None and self.num_chosen < 1:
            raise ConfigError(f"num_chosen: expected a number of at least 1, or None, got {self.num_chosen!r}")

    def reduce(self, stacked: Weights) -> dict[str, Tensor]:
        chosen = self._chosen(stacked)
        return {name: _exact(value[chosen]).mean(dim=0) for name, value in stacked.items()}

    def _chosen(self, stacked: Weights) -> Tensor:
        total = len(next(iter(stacked.values())))
        needed = 2 * self.num_attackers + 3
        if total < needed:
            raise ConfigError(f"Krum with num_attackers={self.num_attackers} needs {needed} updates, got {total}")
        num_chosen = total - self.num_attackers if self.num_chosen is None else self.num_chosen
        distances = torch.zeros(total, total, dtype=torch.float64)
        for value in _real(stacked).values():
            flat = value.reshape(total, -1).double()
            # Not by products: beside an attacker's numbers, honest differences would be lost in rounding.
            distances += torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").cpu() ** 2
        # The score of an update is the sum of its n - f - 2 smallest distances to others. The slice has one more entry,
        # the update's distance of 0 to itself. Distances that overflow to NaN count as the largest.
        nearest = distances.nan_to_num(torch.inf).sort(dim=1).values[:, : total - self.num_attackers - 1]
        return nearest.sum(dim=1).sort(stable=True).indices[:num_chosen]


@dataclass(frozen=True)
class GeometricMedian(RobustAverage):
    """The point with the least sum of distances to all updates, by Weiszfeld's iteration (Pillutla et al., 2022).

    Args:
        max_iterations: The largest number of steps.
        tolerance: Stop when a step is at most this share of the median distance.

    Example:
        >>> points = ([0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.0, 1.0])
        >>> updates = [Update(k, 1, 1, delta={"w": torch.tensor(point)}) for k, point in enumerate(points)]
        >>> GeometricMedian()(updates)
        {'w': tensor([1., 1.])}
    """

    max_iterations: int = 100
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not 1 <= self.max_iterations <= _MAX_ITERATIONS:
            raise ConfigError(
                f"max_iterations: expected a whole number from 1 to {_MAX_ITERATIONS}, got {self.max_iterations!r}"
            )
        expect(self.tolerance >= 0, "tolerance", "a number that is at least 0", self.tolerance)

    def reduce(self, stacked: Weights) -> dict[str, Tensor]:
        exact = {name: value.double() for name, value in stacked.items()}
        real = _real(stacked)
        # A start that a few huge updates cannot move, unlike the mean.
        point = CoordinateMedian().reduce(stacked)
        for _ in range(self.max_iterations):
            distances = _distances(real, point)
            scale = distances.median()
            # Otherwise a point that equals an update would never move, because its weight is infinite.
            pulls = 1 / distances.clamp(min=max(float(scale) * 1e-6, 1e-150))
            pulls = pulls / pulls.sum()
            # Weiszfeld's step: the mean weighted by one over the distance.
            nearer = {name: torch.tensordot(pulls.to(each.device), each, dims=1) for name, each in exact.items()}
            step = _distances({name: nearer[name][None] for name in real}, point)
            point = nearer
            if float(step) <= self.tolerance * float(scale):
                break
        return point


@dataclass(frozen=True)
class NormBound:
    """The mean by samples of updates whose norm is bounded, so that the effect of each update is limited.

    Args:
        max_norm: The largest norm of an update. None means the median of the norms.

    Example:
        >>> updates = [Update(k, 1, 1, delta={"w": torch.tensor([v])}) for k, v in enumerate((1.0, 2.0, 1e30))]
        >>> NormBound()(updates)
        {'w': tensor([1.6667])}
    """

    max_norm: float | None = None

    def __post_init__(self) -> None:
        expect(self.max_norm is None or self.max_norm > 0, "max_norm", "a number above 0, or None", self.max_norm)

    def __call__(self, updates: Sequence[Update]) -> Weights:
        """Return the aggregated difference."""
        if not updates:
            return {}
        bound = self.max_norm
        if bound is None:
            bound = statistics.median(float(norm(update.delta)) for update in updates)
        shortened = [update.with_delta(clip(update.delta, bound)[0]) for update in updates]
        first = updates[0].delta
        return {name: _cast_like(value, first[name]) for name, value in weighted_mean(shortened).items()}


def make_aggregator(spec: str | Mapping[str, Any]) -> Average:
    """Return the average of a name, or of a mapping of one name to its arguments.

    Example:
        >>> make_aggregator({"krum": {"num_attackers": 2}})
        Krum(num_attackers=2, num_chosen=1)
    """
    return build(aggregators, spec)


def _multi_krum(num_attackers: int = 1, num_chosen: int | None = None) -> Krum:
    return Krum(num_attackers, num_chosen)


aggregators: Registry[Callable[..., Average]] = Registry(
    "aggregator",
    lambda: {
        "mean": lambda: weighted_mean,
        "median": CoordinateMedian,
        "trimmed_mean": TrimmedMean,
        "krum": Krum,
        "multi_krum": _multi_krum,
        "geometric_median": GeometricMedian,
        "norm_bound": NormBound,
    },
)


def _exact(value: Tensor) -> Tensor:
    """Return numbers that can be averaged: whole ones and small floats in a larger type."""
    return value.to(torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else torch.float64)


def _cast_like(value: Tensor, given: Tensor) -> Tensor:
    return (value if given.is_floating_point() else value.round()).to(given.dtype)


def _middle(value: Tensor, num_trimmed: int) -> Tensor:
    """Return the mean over the first dimension without so many at either end."""
    return _exact(value.sort(dim=0).values[num_trimmed : len(value) - num_trimmed]).mean(dim=0)


def _real(stacked: Weights) -> dict[str, Tensor]:
    return {name: value for name, value in stacked.items() if value.is_floating_point()}


def _distances(stacked: Weights, point: Weights) -> Tensor:
    """Return how far every update is from a point."""
    total = torch.zeros((), dtype=torch.float64)
    for name, value in stacked.items():
        total = total + (value.double() - point[name].double()).reshape(len(value), -1).square().sum(dim=1).cpu()
    return total.sqrt()
