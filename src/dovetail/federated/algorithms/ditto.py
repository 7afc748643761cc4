"""Ditto: each client also trains a personal model that stays close to the global one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from dovetail.errors import ConfigError, expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.own_model import ModelFunction, first_own_model
from dovetail.federated.algorithms.own_phase import OwnPhaseStrategy, model_state
from dovetail.federated.messages import Weights
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import Phase, TrainingContext
from dovetail.trainers.strategies.anchored import model_parameters
from dovetail.trainers.strategies.nesting import Described

_KEY = "ditto"


@dataclass(eq=False, repr=False)
class DittoUpdateStrategy(Described, OwnPhaseStrategy):
    """Adds epochs for the personal model v after the epochs of w, in which each gradient g becomes g + λ (v − wᵗ).

    wᵗ is the model at the start of the run, which the client received. v uses the optimizer, loss and step of the
    trainer. w is trained exactly as without Ditto. In the personalization round all epochs train v.

    It has the arguments of `Ditto`, and `model_fn`, which builds the initial v (None for the first received model).

    Example:
        >>> import torch
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> from dovetail.trainers.reuse import equip
        >>> trainer = ComposableTrainer(torch.nn.Linear(2, 2), num_epochs=3, verbose=False)
        >>> strategy = DittoUpdateStrategy(ditto_lambda=0.5, personalization_epochs=2)
        >>> equip(trainer, model_update=strategy)
        >>> _ = trainer.fit((torch.randn(8, 2), torch.zeros(8, dtype=torch.long)))
        >>> trainer.context.progress.epoch, sorted(strategy.personal_weights(trainer.context))
        (5, ['bias', 'weight'])
    """

    ditto_lambda: float = 0.1
    personalization_epochs: int = 5
    model_fn: ModelFunction | None = None

    phase_name = _KEY

    def __post_init__(self) -> None:
        expect(self.ditto_lambda >= 0, "ditto_lambda", "a number that is at least 0", self.ditto_lambda)
        if self.personalization_epochs < 0:
            raise ConfigError(
                f"personalization_epochs: expected a whole number that is at least 0, got {self.personalization_epochs}"
            )

    def on_prepare(self, context: TrainingContext) -> None:
        """Initialize v with w before a client's first run."""
        if _KEY not in context.client.state:
            context.client.state[_KEY] = first_own_model(context, self.model_fn)

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return the epochs of w and of v; in the personalization round, of v alone."""
        if personalizes(context):
            return (Phase(epochs, self.phase_name, is_detached=True),)
        return super().phases(epochs, context)

    def own_epochs(self, context: TrainingContext) -> int:
        return self.personalization_epochs

    def own_start(self, context: TrainingContext) -> Weights:
        own: Weights = context.client.state[_KEY]
        return own

    def own_end(self, context: TrainingContext) -> None:
        context.client.state[_KEY] = model_state(context)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        if not context.run.is_detached:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        start: Weights = self.anchor["start"]
        for name, parameter in model_parameters(context).items():
            if parameter.grad is not None and id(parameter) in stepped:
                parameter.grad.add_(parameter.detach() - start[name], alpha=self.ditto_lambda)

    def personal_weights(self, context: TrainingContext) -> Mapping[str, Tensor] | None:
        """Return v."""
        return context.client.state.get(_KEY)


@dataclass(eq=False, repr=False)
class DittoUpdateStrategyFromConfig(DittoUpdateStrategy):
    """Ditto with `ditto_lambda` and `personalization_epochs` (or `personalization.epochs`) of the configuration.

    Example:
        >>> DittoUpdateStrategyFromConfig()
        DittoUpdateStrategyFromConfig()
    """

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Read the configuration of the run that is planned."""
        told = context.config.get("algorithm", {})
        self.ditto_lambda = float(told.get("ditto_lambda", self.ditto_lambda))
        own = told.get("personalization", {}).get("epochs", self.personalization_epochs)
        self.personalization_epochs = int(told.get("personalization_epochs", own))
        return super().phases(epochs, context)


@dataclass(eq=False, repr=False)
class Ditto(StrategyAlgorithm):
    """FedAvg whose clients also minimise F_k(v) + λ/2 ‖v − wᵗ‖² for themselves (Li et al., 2021).

    Args:
        ditto_lambda: λ, at least 0; with 0, v is trained independently of w.
        personalization_epochs: The epochs of v in every round, after the epochs of w.

    Example:
        >>> Ditto(ditto_lambda=1.0)
        Ditto(ditto_lambda=1.0)
    """

    ditto_lambda: float = 0.1
    personalization_epochs: int = 5

    decides = ("the client's own model",)
    client_strategies: ClassVar = {"model_update": DittoUpdateStrategy}
