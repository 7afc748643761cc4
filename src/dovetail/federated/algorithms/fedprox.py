"""FedProx: a proximal term keeps clients close to the model that they received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from dovetail.errors import UnknownNameError, expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.penalty import PenalizedLossStrategy
from dovetail.federated.messages import Weights
from dovetail.trainers.context import TrainingContext

_NORMS = ("l2", "l1")


@dataclass(eq=False, repr=False)
class FedProxLossStrategy(PenalizedLossStrategy):
    """The loss of the task plus μ/2 ‖w − wᵗ‖², whose gradient is μ (w − wᵗ).

    wᵗ is the model at the start of the run: in a federation, the model that the client received. It has
    the arguments of `FedProx`, and `base_loss_fn`.

    Example:
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> trainer = ComposableTrainer(loss_strategy=FedProxLossStrategy(mu=0.1), verbose=False)
        >>> trainer.strategies.loss
        FedProxLossStrategy(mu=0.1)
    """

    mu: float = 0.01
    norm_type: Literal["l2", "l1"] = "l2"

    def __post_init__(self) -> None:
        expect(self.mu >= 0, "mu", "a number that is at least 0", self.mu)
        if self.norm_type not in _NORMS:
            raise UnknownNameError("norm_type", self.norm_type, _NORMS)
        super().__post_init__()

    def penalty(self, weights: Weights, anchor: Weights) -> Tensor:
        away = [value - anchor[name] for name, value in weights.items()]
        terms = [it.square().sum() if self.norm_type == "l2" else it.abs().sum() for it in away]
        return self.mu / 2 * sum(terms[1:], start=terms[0])


@dataclass(eq=False, repr=False)
class FedProxLossStrategyFromConfig(FedProxLossStrategy):
    """FedProx's loss with `fedprox_mu` or `proximal_term_penalty_constant` of the configuration, under `algorithm`.

    Example:
        >>> FedProxLossStrategyFromConfig()
        FedProxLossStrategyFromConfig()
    """

    def on_train_start(self, context: TrainingContext) -> None:
        told = context.config.get("algorithm", {})
        self.mu = float(told.get("fedprox_mu", told.get("proximal_term_penalty_constant", self.mu)))
        super().on_train_start(context)


@dataclass(eq=False, repr=False)
class FedProx(StrategyAlgorithm):
    """FedAvg whose clients minimise F_k(w) + μ/2 ‖w − wᵗ‖² (Li et al., 2020).

    Args:
        mu: μ, at least 0; 0 is FedAvg.
        norm_type: `"l2"` for the square of the distance, as in the paper; `"l1"` for the sum of absolute differences.

    Example:
        >>> FedProx(mu=0.1)
        FedProx(mu=0.1)
    """

    mu: float = 0.01
    norm_type: Literal["l2", "l1"] = "l2"

    client_strategies: ClassVar = {"loss": FedProxLossStrategy}
