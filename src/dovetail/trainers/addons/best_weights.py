"""Best weights of a trainer: a copy of the weights with the smallest loss at the end of an epoch."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dovetail.callbacks import Callback
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.fitting import restoring

if TYPE_CHECKING:
    from dovetail.trainers.trainer import Trainer

    Mounted = Trainer
else:
    Mounted = object


class BestWeights(Mounted):
    """Mixin for a trainer that stores the weights with the smallest loss.

    Attributes:
        loss_buffer: The smallest loss so far; infinity before the first.
        weight_buffer: The epoch and the weights of the smallest loss; None before the first.
    """

    loss_buffer: float = math.inf
    weight_buffer: dict[str, Any] | None = None
    _best_weights: _BestWeights | None = None

    def check_better(self, cur_epoch: int, cur_loss: float) -> bool:
        """Store a copy of the weights if the loss is the smallest so far, and return whether it is."""
        if not cur_loss < self.loss_buffer:
            return False
        self.loss_buffer = cur_loss
        self.weight_buffer = {"epoch": cur_epoch, "weight": _copied(self.model.state_dict())}
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`, with the best weights if they were stored."""
        with restoring("callbacks"):
            # The callback must exist before the states of callbacks are restored, which are matched by class name.
            has_best = any(entry["name"] == _BestWeights.__name__ for entry in state["callbacks"])
        if has_best:
            self._follow_best()
        super().load_state_dict(state)

    def _follow_best(self) -> None:
        """Call `check_better` after every epoch from now on, and include the best weights in checkpoints."""
        if self._best_weights is None:
            self._best_weights = _BestWeights(self)
        # The last callback: `check_better` may read metrics that another one computes.
        self.context.callbacks.remove(self._best_weights)
        self.context.callbacks.add(self._best_weights)


class TrainerPart(Callback):
    """A callback that belongs to one trainer."""

    def __init__(self, trainer: Any) -> None:
        # A weak reference: the trainer holds its context, which holds this callback.
        self._reference = weakref.ref(trainer.core)

    @property
    def _trainer(self) -> Any:
        trainer = self._reference()
        assert trainer is not None, "only the trainer that it belongs to calls it"
        return trainer

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._trainer,)


# Checkpoints contain the name of this class.
class _BestWeights(TrainerPart):
    """Calls `check_better` after every epoch, and includes the best weights in checkpoints."""

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        validates = context.run.plan is not None and context.run.plan.validate is not None
        # A training loss cannot be compared with the losses of validations.
        if validates and context.run.validated_at != context.progress.batches:
            return
        loss = metrics.get("valid_loss", metrics.get("train_loss", math.nan))
        self._trainer.check_better(context.progress.epoch, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"loss_buffer": self._trainer.loss_buffer, "weight_buffer": self._trainer.weight_buffer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trainer.loss_buffer, self._trainer.weight_buffer = state["loss_buffer"], state["weight_buffer"]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }
