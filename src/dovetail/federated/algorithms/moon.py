"""MOON: a contrastive loss keeps the representations of clients close to the global model's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from dovetail.errors import ConfigError, expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.own_phase import model_state
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.modules import forward_with
from dovetail.trainers.strategies.anchored import Anchored
from dovetail.trainers.strategies.training_step import Criterion, NestingStepStrategy

_KEY = "moon"


@runtime_checkable
class Projecting(Protocol):
    """A model that returns a projection of its features besides its outputs."""

    def forward_with_projection(self, *inputs: Any) -> tuple[Any, Tensor, Any]:
        """Return features, their projection with one row per sample, and what `forward` returns."""


class _Shown(nn.Module):
    """Calls a model and stores its projection; it returns the outputs of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.projection: Tensor | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        model: Any = self.model
        _, self.projection, outputs = model.forward_with_projection(*inputs, **named)
        return outputs


@dataclass(eq=False, repr=False)
class MOONStepStrategy(Anchored, NestingStepStrategy):
    """The loss of the task plus μ · CE([sim(z, z_glob), sim(z, z_prev), …] / τ, 0), with sim the cosine.

    z is the projection of a sample by the model, z_glob by the model at the start of the run, and z_prev by the final
    models of the client's last runs. Without such runs it is the loss of the task. The other models are in
    evaluation mode, so that they ignore dropout and other samples of the batch, and keep their statistics.

    It has the arguments of `MOON`, and `base_strategy`, the step inside (None for a plain one).

    Example:
        >>> MOONStepStrategy(mu=1.0)
        MOONStepStrategy(mu=1.0)
    """

    mu: float = 5.0
    temperature: float = 0.5
    history_size: int = 1
    # Set for the duration of a run.
    _mine: _Shown | None = field(default=None, init=False)
    _other: _Shown | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        expect(self.mu >= 0, "mu", "a number that is at least 0", self.mu)
        expect(self.temperature > 0, "temperature", "a number above 0", self.temperature)
        expect(self.history_size >= 1, "history_size", "a whole number that is at least 1", self.history_size)

    def on_prepare(self, context: TrainingContext) -> None:
        """Initialize the list of earlier models before a client's first run."""
        super().on_prepare(context)
        context.client.state.setdefault(_KEY, [])

    def capture(self, context: TrainingContext) -> dict[str, Any]:
        return {"global": model_state(context), "previous": list(context.client.state.get(_KEY, []))}

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        assert context.model is not None
        _check_projects(context.model)
        self._mine, self._other = _Shown(context.model), _Shown(copy.deepcopy(context.model)).eval()

    def on_train_end(self, context: TrainingContext) -> None:
        super().on_train_end(context)
        self._mine = self._other = None
        # The personalization round does not belong to the rounds whose models are compared.
        if not personalizes(context):
            kept = [*self.anchor["previous"], model_state(context)]
            context.client.state[_KEY] = kept[-self.history_size :]

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        mine = self._mine
        if mine is None or not self.mu or not self.anchor["previous"] or context.run.is_detached:
            return super().loss(model, optimizer, examples, labels, loss_criterion, context)

        def contrasted(outputs: Any, labels: Any) -> Tensor:
            return loss_criterion(outputs, labels) + self.mu * self._contrast(mine.projection, examples)

        return super().loss(mine, optimizer, examples, labels, contrasted, context)

    def _contrast(self, projection: Tensor | None, examples: Any) -> Tensor:
        assert projection is not None
        others = [self.anchor["global"], *self.anchor["previous"]]
        alike = [F.cosine_similarity(projection, self._seen_by(each, examples), dim=-1) for each in others]
        # Class 0 is the global model: cross entropy pulls z to z_glob and pushes it away from all z_prev.
        logits = torch.stack(alike, dim=-1) / self.temperature
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))

    def _seen_by(self, state: Mapping[str, Tensor], examples: Any) -> Tensor:
        assert self._other is not None
        with torch.no_grad():
            forward_with(self._other, {f"model.{name}": value for name, value in state.items()}, examples)
        assert self._other.projection is not None
        return self._other.projection


@dataclass(eq=False, repr=False)
class MOON(StrategyAlgorithm):
    """FedAvg with a contrastive loss at clients: near the global model, away from their last ones (Li et al., 2021).

    The model must have `forward_with_projection(x)`, which returns features, a projection and outputs.

    Args:
        mu: μ, at least 0; 0 is FedAvg.
        temperature: τ, above 0.
        history_size: The number of its last models that a client keeps, at least 1.

    Example:
        >>> MOON(mu=1.0)
        MOON(mu=1.0)
    """

    mu: float = 5.0
    temperature: float = 0.5
    history_size: int = 1

    decides = ("how a batch is computed",)
    client_strategies: ClassVar = {"training_step": MOONStepStrategy}

    def prepare(self, model: nn.Module, num_clients: int) -> None:
        super().prepare(model, num_clients)
        _check_projects(model)


def _check_projects(model: nn.Module) -> None:
    if not isinstance(model, Projecting):
        raise ConfigError(
            f"MOON: {type(model).__name__} has no forward_with_projection; give a model with this method, which "
            "returns features, projection and outputs"
        )
