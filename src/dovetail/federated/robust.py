"""Means that a few bad updates cannot move far."""

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
    """Makes one difference of many, of which some are bad. Updates count the same, whatever samples they claim.

    The updates are finite and have the same tensors: `dovetail.federated.validation` has seen to it. What comes out has
    their types; whole numbers are rounded.
    """

    def __call__(self, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the difference that the weights move by."""
        if not updates:
            return {}
        first = updates[0].delta
        stacked = {name: torch.stack([update.delta[name] for update in updates]) for name in first}
        return {name: _like(value, first[name]) for name, value in self.reduce(stacked).items()}

    @abstractmethod
    def reduce(self, stacked: Weights) -> Weights:
        """Return tensors without the first dimension, which counts the updates.

        Whole numbers count for no distance: how many batches a client has seen says nothing of its honesty.
        """


@dataclass(frozen=True)
class CoordinateMedian(RobustAverage):
    """The median of every number by itself. It stands fewer bad updates than good ones.

    Example:
        >>> updates = [Update(k, 1, 1, delta={"w": torch.tensor([v])}) for k, v in enumerate((1.0, 2.0, 1e30))]
        >>> CoordinateMedian()(updates)
        {'w': tensor([2.])}
    """

    def reduce(self, stacked: Weights) -> dict[str, Tensor]:
        """Return the medians; between the two in the middle of an even number."""
        return {name: _middle(value, (len(value) - 1) // 2) for name, value in stacked.items()}


@dataclass(frozen=True)
class TrimmedMean(RobustAverage):
    """The mean of every number by itself, without the largest and the smallest.

    Args:
        share: The share of updates to leave out at either end, rounded down. As many bad updates are harmless.

    Example:
        >>> updates = [Update(k, 1, 1, delta={"w": torch.tensor([v])}) for k, v in enumerate((1.0, 2.0, 3.0, 1e30))]
        >>> TrimmedMean(share=0.25)(updates)
        {'w': tensor([2.5000])}
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        expect(0 <= self.share < 0.5, "share", "a number from 0 and below 0.5", self.share)

    def reduce(self, stacked: Weights) -> dict[str, Tensor]:
        # The smallest bit more, so that a share of 0.29 of 100 is 29.
        return {name: _middle(value, int(self.share * len(value) + 1e-9)) for name, value in stacked.items()}


@dataclass(frozen=True)
class Krum(RobustAverage):
    """The update that is nearest to its nearest ones, or the mean of several such (Blanchard et al., 2017).

    Args:
        num_attackers: How many bad updates there may be; at least twice as many and 3 are needed.
        num_chosen: Over how many updates to take the mean; None for all but `num_attackers` (multi-Krum).

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
        # The nearest one of all is the update itself, at no distance.
        nearest = distances.nan_to_num(torch.inf).sort(dim=1).values[:, : total - self.num_attackers - 1]
        return nearest.sum(dim=1).sort(stable=True).indices[:num_chosen]


@dataclass(frozen=True)
class GeometricMedian(RobustAverage):
    """The point with the least sum of distances to all updates, by Weiszfeld's iteration (Pillutla et al., 2022).

    Args:
        max_iterations: The most steps to take.
        tolerance: Stop where a step is this small, beside the median distance.

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
        point = CoordinateMedian().reduce(stacked)
        for _ in range(self.max_iterations):
            distances = _distances(real, point)
            scale = distances.median()
            # Otherwise a point that equals an update would never move, because its weight is infinite.
            pulls = 1 / distances.clamp(min=max(float(scale) * 1e-6, 1e-150))
            pulls = pulls / pulls.sum()
            nearer = {name: torch.tensordot(pulls.to(each.device), each, dims=1) for name, each in exact.items()}
            step = _distances({name: nearer[name][None] for name in real}, point)
            point = nearer
            if float(step) <= self.tolerance * float(scale):
                break
        return point


@dataclass(frozen=True)
class NormBound:
    """The mean by samples of updates that are shortened to a norm: each can do so much harm and no more.

    Args:
        max_norm: The longest that an update can be; None for the median of their norms.

    Example:
        >>> updates = [Update(k, 1, 1, delta={"w": torch.tensor([v])}) for k, v in enumerate((1.0, 2.0, 1e30))]
        >>> NormBound()(updates)
        {'w': tensor([1.6667])}
    """

    max_norm: float | None = None

    def __post_init__(self) -> None:
        expect(self.max_norm is None or self.max_norm > 0, "max_norm", "a number above 0, or None", self.max_norm)

    def __call__(self, updates: Sequence[Update]) -> Weights:
        """Return the difference that the weights move by."""
        if not updates:
            return {}
        bound = self.max_norm
        if bound is None:
            bound = statistics.median(float(norm(update.delta)) for update in updates)
        shortened = [update.with_delta(clip(update.delta, bound)[0]) for update in updates]
        first = updates[0].delta
        return {name: _like(value, first[name]) for name, value in weighted_mean(shortened).items()}


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


def _like(value: Tensor, given: Tensor) -> Tensor:
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
