"""Additional epochs of a run for personal weights, after the epochs of the model that is sent."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.trainers.context import Phase, TrainingContext
from dovetail.trainers.strategies.anchored import Anchored, Weights, copy_tensors, model_parameters
from dovetail.trainers.strategies.base import ModelUpdateStrategy


def model_state(context: TrainingContext) -> dict[str, Tensor]:
    """Return copies of the model's parameters and buffers, by name."""
    assert context.model is not None
    return {name: value.detach().clone() for name, value in context.model.state_dict().items()}


def load_in_place(context: TrainingContext, weights: Weights) -> None:
    """Copy weights into the model, in place; other entries do not change."""
    assert context.model is not None
    state = context.model.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            state[name].copy_(value)


def optimizers_of(context: TrainingContext) -> dict[str, Any]:
    """Return the states of optimizers and schedules, for `restore_optimizers`."""
    return {
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in context.optimizers],
        "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in context.schedulers],
    }


def restore_optimizers(context: TrainingContext, anchor: Mapping[str, Any]) -> None:
    """Restore the states returned by `optimizers_of`."""
    for optimizer, state in zip(context.optimizers, anchor["optimizers"], strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))
    for scheduler, state in zip(context.schedulers, anchor["schedulers"], strict=True):
        scheduler.load_state_dict(copy.deepcopy(state))


class OwnPhaseStrategy(Anchored, ModelUpdateStrategy, ABC):
    """Continues a run, after the epochs of the model that is sent, with other weights in the model.

    Optimizers and schedules start there as at the start of the run. At the end, the model that is sent is restored.
    """

    vectorizes = True
    phase_name = "own"

    @abstractmethod
    def own_epochs(self, context: TrainingContext) -> int:
        """Return the number of additional epochs; 0 for none."""

    @abstractmethod
    def own_start(self, context: TrainingContext) -> Weights:
        """Return the weights at the start of the additional epochs."""

    @abstractmethod
    def own_end(self, context: TrainingContext) -> None:
        """Read the model at their end, before the model that is sent is restored."""

    def capture(self, context: TrainingContext) -> dict[str, Any]:
        return {"start": copy_tensors(model_parameters(context)), **optimizers_of(context)}

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return the epochs of the model that is sent, and those that follow."""
        return Phase(epochs), Phase(self.own_epochs(context), self.phase_name, is_detached=True)

    def on_phase_start(self, phase: Phase, context: TrainingContext) -> None:
        if not phase.is_detached:
            return
        self.anchor["sent"] = model_state(context)
        load_in_place(context, self.own_start(context))
        # The optimizer has the momentum of the model that is sent, which does not belong to these weights.
        restore_optimizers(context, self.anchor)

    def on_train_end(self, context: TrainingContext) -> None:
        if "sent" in self.anchor:
            self.own_end(context)
            # Removed from `anchor`: the entry also marks that the additional epochs run, for a resumed run.
            load_in_place(context, self.anchor.pop("sent"))
        context.run.is_detached = False
        super().on_train_end(context)

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        context.run.is_detached = "sent" in self.anchor

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if isinstance(self.anchor, Mapping):
            # A loaded mapping may be shared with the checkpoint, and `on_phase_start` adds to it.
            self.anchor = dict(self.anchor)
