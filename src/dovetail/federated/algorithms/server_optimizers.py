"""Server optimizers: the mean of updates is used as a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import ConfigError
from dovetail.federated.algorithms.parameters import ParameterAware
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Update, Weights
from dovetail.trainers.strategies.nesting import Described

# The moments of one tensor by name; empty before the first round.
Moments = Mapping[str, Tensor]


class ServerOptimizer(Described, ParameterAware, ABC):
    """Steps along Δ, the mean of a round's updates, with moments that are kept from round to round.

    Only floating parameters are stepped. Buffers, such as the statistics of BatchNorm, are averaged, because steps
    could make variances negative.

    Example:
        >>> from dovetail.federated.averaging import weighted_mean
        >>> @dataclass(eq=False, repr=False)
        ... class Signs(ServerOptimizer):
        ...     server_learning_rate: float = 0.1
        ...     def step(self, change, moments):
        ...         return self.server_learning_rate * change.sign(), moments
        >>> update = Update(1, 1, 10, delta={"w": torch.tensor(7.0)})
        >>> Signs().aggregate({"w": torch.tensor(1.0)}, [update], weighted_mean)
        {'w': tensor(1.1000)}
    """

    decides = ("how the server steps",)

    def __post_init__(self) -> None:
        self._moments: dict[str, Moments] = {}
        for name, value in vars(self).items():
            if name in ("server_learning_rate", "tau") and not value > 0:
                raise ConfigError(f"{name}: expected a number above 0, got {value!r}")
            if name in ("momentum", "beta_1", "beta_2") and not 0 <= value < 1:
                raise ConfigError(f"{name}: expected a number from 0 and below 1, got {value!r}")

    @abstractmethod
    def step(self, change: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """Return how far a tensor moves, and its new moments.

        Args:
            change: Δ of the tensor.
            moments: The moments that the last step returned; empty in the first round.
        """

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        mean = average(updates)
        steps = {}
        for name, change in self.parameters_of(mean).items():
            steps[name], self._moments[name] = self.step(change, self._moments.get(name, {}))
        return moved(weights, {**mean, **steps})

    def state_dict(self) -> dict[str, Any]:
        return {"moments": {name: dict(moments) for name, moments in self._moments.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments = dict(state["moments"])


@dataclass(eq=False, repr=False)
class FedAvgM(ServerOptimizer):
    """m ← β m + Δ, w ← w + η m: federated averaging with a server that has momentum (Hsu et al., 2019).

    Args:
        server_learning_rate: η.
        momentum: β; 0 is FedAvg with a rate.

    Example:
        >>> from dovetail.federated.averaging import weighted_mean
        >>> server, weights = FedAvgM(momentum=0.5), {"w": torch.tensor(0.0)}
        >>> for _ in range(2):
        ...     weights = server.aggregate(weights, [Update(1, 1, 10, delta={"w": torch.tensor(1.0)})], weighted_mean)
        >>> weights  # 1, and 1.5 more
        {'w': tensor(2.5000)}
    """

    server_learning_rate: float = 1.0
    momentum: float = 0.9

    def step(self, change: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        m = change + self.momentum * moments.get("m", 0.0)
        return self.server_learning_rate * m, {"m": m}


class AdaptiveServer(ServerOptimizer):
    """m ← β₁ m + (1 − β₁) Δ, w ← w + η m / (√v + τ), for every number by itself (Reddi et al., 2021).

    Subclasses compute v from Δ². As in the paper, v starts at τ² and m at 0, without a bias correction.

    Example:
        >>> isinstance(FedYogi(), AdaptiveServer), isinstance(FedAvgM(), AdaptiveServer)
        (True, False)
    """

    server_learning_rate: float
    beta_1: float
    tau: float

    @abstractmethod
    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        """Return the new v, of the one before and Δ²."""

    def step(self, change: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        m = (1 - self.beta_1) * change + self.beta_1 * moments.get("m", 0.0)
        # v₋₁ = τ², the least value that algorithm 2 of the paper allows.
        v = moments["v"] if moments else torch.full_like(change, self.tau**2)
        v = self.second_moment(v, change.square())
        return self.server_learning_rate * m / (v.sqrt() + self.tau), {"m": m, "v": v}


@dataclass(eq=False, repr=False)
class FedAdagrad(AdaptiveServer):
    """v ← v + Δ²: steps shrink with the sum of all squared changes (Reddi et al., 2021).

    Args:
        server_learning_rate: η.
        beta_1: How much of m stays from round to round; 0 in the paper.
        tau: The smallest divisor of a step.

    Example:
        >>> from dovetail.federated.averaging import weighted_mean
        >>> update = Update(1, 1, 10, delta={"w": torch.tensor([0.5, 0.0])})
        >>> FedAdagrad(server_learning_rate=0.3).aggregate({"w": torch.zeros(2)}, [update], weighted_mean)
        {'w': tensor([0.2994, 0.0000])}
    """

    server_learning_rate: float = 0.1
    beta_1: float = 0.0
    tau: float = 1e-3

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        return v + squares


@dataclass(eq=False, repr=False)
class FedAdam(AdaptiveServer):
    """v ← β₂ v + (1 − β₂) Δ²: steps adapt to the recent size of changes (Reddi et al., 2021).

    Args:
        server_learning_rate: η.
        beta_1: How much of m stays from round to round.
        beta_2: How much of v stays.
        tau: The smallest divisor of a step: the larger, the less steps adapt.

    Example:
        >>> from dovetail.federated.averaging import weighted_mean
        >>> update = Update(1, 1, 10, delta={"w": torch.tensor([0.5, 0.0])})
        >>> FedAdam().aggregate({"w": torch.zeros(2)}, [update], weighted_mean)
        {'w': tensor([0.0980, 0.0000])}
    """

    server_learning_rate: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        return self.beta_2 * v + (1 - self.beta_2) * squares


@dataclass(eq=False, repr=False)
class FedYogi(FedAdam):
    """v ← v − (1 − β₂) Δ² sign(v − Δ²): as FedAdam, but v shrinks no faster than by Δ² (Reddi et al., 2021).

    It has the arguments of `FedAdam`.

    Example:
        >>> from dovetail.federated.averaging import weighted_mean
        >>> update = Update(1, 1, 10, delta={"w": torch.tensor([0.5, 0.0])})
        >>> FedYogi().aggregate({"w": torch.zeros(2)}, [update], weighted_mean)
        {'w': tensor([0.0980, 0.0000])}
    """

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        # Additive, unlike FedAdam's exponential average: a sudden small Δ cannot shrink v, and so enlarge steps,
        # quickly.
        return v - (1 - self.beta_2) * squares * torch.sign(v - squares)
