"""Ditto: beside the model that it sends, every client trains one of its own, not far from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from dovetail.errors import ConfigError, expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.own_model import ModelFunction, first_own_model
from dovetail.federated.algorithms.own_phase import OwnPhaseStrategy, model_state
from dovetail.federated.messages import Weights
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import Phase
from dovetail.trainers.strategies.anchored import trained
from dovetail.trainers.strategies.nesting import Described

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

__all__ = ["Ditto", "DittoUpdateStrategy", "DittoUpdateStrategyFromConfig"]

_KEY = "ditto"


@dataclass(eq=False, repr=False)
class DittoUpdateStrategy(Described, OwnPhaseStrategy):
    """After the epochs of w come some of the client's own model v: every gradient g of it becomes g + λ (v − wᵗ).

    wᵗ is what the run began with: in a federation, the model that the client was sent. Optimizer, loss and step are
    those of the trainer, and the epochs are those of its loop. w is trained exactly as without Ditto.

    In the personalisation round nothing is sent, so all its epochs are those of v.

    Args:
        ditto_lambda: λ, at least 0; 0 trains v alone, without a look at w.
        personalization_epochs: Epochs of v in every round.
        model_fn: Makes the v that a client begins with; None for the first model that it is sent.

    Example:
        >>> import torch
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> trainer = ComposableTrainer(torch.nn.Linear(2, 2), num_epochs=3, verbose=False)
        >>> strategy = DittoUpdateStrategy(ditto_lambda=0.5, personalization_epochs=2)
        >>> trainer.equip(model_update=strategy)
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

    def on_client_start(self, context: TrainingContext) -> None:
        """A client begins with v = w."""
        if _KEY not in context.client.state:
            context.client.state[_KEY] = first_own_model(context, self.model_fn)

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return the epochs of w, and those of v; in the personalisation round, those of v alone."""
        if personalizes(context):
            return (Phase(epochs, self.phase_name, is_personal=True),)
        return super().phases(epochs, context)

    def own_epochs(self, context: TrainingContext) -> int:
        return self.personalization_epochs

    def own_start(self, context: TrainingContext) -> Weights:
        own: Weights = context.client.state[_KEY]
        return own

    def own_end(self, context: TrainingContext) -> None:
        context.client.state[_KEY] = model_state(context)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        if not context.run.is_personal:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        start: Weights = self.kept["start"]
        for name, parameter in trained(context).items():
            if parameter.grad is not None and id(parameter) in stepped:
                parameter.grad.add_(parameter.detach() - start[name], alpha=self.ditto_lambda)

    def personal_weights(self, context: TrainingContext) -> Mapping[str, Tensor] | None:
        """Return v."""
        return context.client.state.get(_KEY)


@dataclass(eq=False, repr=False)
class DittoUpdateStrategyFromConfig(DittoUpdateStrategy):
    """Ditto with the settings of the configuration, under `algorithm`.

    They are `ditto_lambda` and `personalization_epochs`, or `epochs` under `personalization`.

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
        ditto_lambda: λ, at least 0.
        personalization_epochs: Epochs of v in every round, after those of w.

    Example:
        >>> Ditto(ditto_lambda=1.0)
        Ditto(ditto_lambda=1.0)
    """

    ditto_lambda: float = 0.1
    personalization_epochs: int = 5

    decides = ("the client's own model",)
    client_strategies: ClassVar = {"model_update": DittoUpdateStrategy}
