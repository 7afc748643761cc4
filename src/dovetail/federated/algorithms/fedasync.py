"""FedAsync: asynchronous federated optimization, which mixes every update into the global model on arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dovetail.errors import ConfigError
from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Update, Weights
from dovetail.federated.specs import build
from dovetail.registry import Registry

StalenessWeight = Callable[[int], float]


def constant() -> StalenessWeight:
    """Return the weight 1, however stale an update is."""
    return lambda staleness: 1.0


def polynomial(a: float = 0.5) -> StalenessWeight:
    """Return (staleness + 1)^-a."""
    return lambda staleness: math.pow(staleness + 1, -a)


def hinge(a: float = 10.0, b: float = 4.0) -> StalenessWeight:
    """Return 1 up to a staleness of b, and 1 / (a (staleness - b) + 1) beyond."""
    return lambda staleness: 1.0 if staleness <= b else 1 / (a * (staleness - b) + 1)


staleness_weights: Registry[Callable[..., StalenessWeight]] = Registry(
    "staleness weighting", lambda: {"constant": constant, "polynomial": polynomial, "hinge": hinge}
)


class FedAsync(Algorithm):
    """w ← (1 − m) w + m w_k for every update, in the order in which clients were selected (Xie et al., 2019).

    w_k are the trained weights of the client, which may have started from an older w. It is meant for an asynchronous
    server that waits for one update at a time.

    Args:
        mixing_hyperparameter: m, above 0 and at most 1.
        adaptive_mixing: Multiply m by a weight for the staleness of each update.
        staleness_weighting_function: That weight: `"constant"`, `"polynomial"` or `"hinge"`, or a mapping with such a
            `type` and its numbers `a` and `b`.

    Example:
        >>> import torch
        >>> from dovetail.federated.averaging import weighted_mean
        >>> algorithm = FedAsync(
        ...     0.5, adaptive_mixing=True, staleness_weighting_function={"type": "polynomial", "a": 1}
        ... )
        >>> late = Update(1, 1, 10, delta={"w": torch.tensor(4.0)}, staleness=1, sent={"w": torch.tensor(0.0)})
        >>> algorithm.aggregate({"w": torch.tensor(2.0)}, [late], weighted_mean)  # 0.75 · 2 + 0.25 · 4
        {'w': tensor(2.5000)}
    """

    def __init__(
        self,
        mixing_hyperparameter: float = 0.9,
        adaptive_mixing: bool = False,
        staleness_weighting_function: str | Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 < mixing_hyperparameter <= 1:
            raise ConfigError(
                f"mixing_hyperparameter: expected a number above 0 and at most 1, got {mixing_hyperparameter!r}"
            )
        if staleness_weighting_function is not None and not adaptive_mixing:
            raise ConfigError("staleness_weighting_function: only counts with adaptive_mixing=True")
        self.mixing_hyperparameter = mixing_hyperparameter
        self.adaptive_mixing = adaptive_mixing
        self._weight = _weight(staleness_weighting_function or ("polynomial" if adaptive_mixing else "constant"))

    def mixing(self, staleness: int) -> float:
        """Return the mixing weight of an update."""
        return self.mixing_hyperparameter * self._weight(staleness)

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        mixed = dict(weights)
        for update in updates:
            delta = average([update])
            # w_k − w = (sent − w) + Δ_k, because a client sends its difference to the weights that it received.
            away = {name: update.sent[name].to(mixed[name].device) - mixed[name] for name in delta}
            towards = {name: away[name] + change.to(away[name].device) for name, change in delta.items()}
            mixed = moved(mixed, towards, self.mixing(update.staleness))
        return mixed


def _weight(function: str | Mapping[str, Any]) -> StalenessWeight:
    if isinstance(function, str):
        return build(staleness_weights, function)
    arguments = dict(function)
    return build(staleness_weights, {str(arguments.pop("type", "polynomial")): arguments})
