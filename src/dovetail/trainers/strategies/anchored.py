"""Base of strategies that store a value from the start of a run, such as the initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dovetail.trainers.strategies.base import Strategy

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


# Tensors by the names of a model's parameters.
Weights = Mapping[str, Tensor]


def model_parameters(context: TrainingContext) -> dict[str, Tensor]:
    """Return the model's parameters, by name."""
    assert context.model is not None
    return dict(context.model.named_parameters())


def copy_tensors(weights: Weights) -> dict[str, Tensor]:
    """Return copies of tensors, without their graphs."""
    return {name: value.detach().clone() for name, value in weights.items()}


class Anchored(Strategy):
    """A strategy that stores a value at the start of a run; a resumed run restores it.

    A subclass returns the value in `capture`. It is available as `self.anchor`, and checkpoints contain it.
    """

    anchor: Any = None
    _run_id: str = ""

    def capture(self, context: TrainingContext) -> Any:
        """Return the value to store: tensors and plain values. By default, a copy of the parameters."""
        return copy_tensors(model_parameters(context))

    def on_train_start(self, context: TrainingContext) -> None:
        """Call `capture` at the start of a run; a resumed run keeps its restored value."""
        super().on_train_start(context)
        # A resumed run has the identifier of the checkpoint, from which `anchor` was restored as well.
        if not context.run.id or context.run.id != self._run_id:
            self.anchor, self._run_id = self.capture(context), context.run.id

    def state_dict(self) -> dict[str, Any]:
        """Return the stored value; empty before the first run."""
        own = {"kept": self.anchor, "run_id": self._run_id} if self._run_id else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        super().load_state_dict(state)
        if "run_id" in state:
            self.anchor, self._run_id = state["kept"], state["run_id"]
