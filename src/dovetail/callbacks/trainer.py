"""plato's trainer callback, and the adapter that calls it at the events of our loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.callbacks.base import Callback

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class TrainerCallback:
    """Plato's trainer callback: every event gets the trainer and its configuration.

    Step events count updates, as in plato: in an accumulation window only the last batch calls `on_train_step_end`.
    `batch` is the index of the batch in the epoch, not its content.

    Example:
        >>> class PrintLoss(TrainerCallback):
        ...     def on_train_step_end(self, trainer, config, batch=None, loss=None, **kwargs):
        ...         print(f"batch {batch}: {loss:.3f}")
    """

    def on_train_run_start(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Called before the first batch of a run."""

    def on_train_run_end(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Called after the last batch of a run."""

    def on_train_epoch_start(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Called after an epoch."""

    def on_train_step_start(
        self, trainer: Any, config: Mapping[str, Any], batch: int | None = None, **kwargs: Any
    ) -> None:
        """Called before a training batch."""

    def on_train_step_end(
        self, trainer: Any, config: Mapping[str, Any], batch: int | None = None, loss: Any = None, **kwargs: Any
    ) -> None:
        """Called after an update, with the detached loss of its last batch."""


class PlatoAdapter(Callback):
    """Calls a `TrainerCallback` at the events of our loop."""

    def __init__(self, callback: TrainerCallback) -> None:
        self.callback = callback

    def on_train_start(self, context: TrainingContext) -> None:
        self.callback.on_train_run_start(context.run.trainer, context.config)

    def on_train_end(self, context: TrainingContext) -> None:
        self.callback.on_train_run_end(context.run.trainer, context.config)

    def on_epoch_start(self, context: TrainingContext) -> None:
        self.callback.on_train_epoch_start(context.run.trainer, context.config)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self.callback.on_train_epoch_end(context.run.trainer, context.config)

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        self.callback.on_train_step_start(context.run.trainer, context.config, batch=context.progress.batch)

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        if context.run.window.closes:
            # The loop has already counted the batch.
            self.callback.on_train_step_end(
                context.run.trainer, context.config, batch=context.progress.batch - 1, loss=output["loss"].detach()
            )
