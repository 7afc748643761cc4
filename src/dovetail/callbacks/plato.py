"""Plato's trainer callbacks: their events, the adapter that calls them here, and Plato's list of callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dovetail.callbacks.base import Callback, Callbacks
from dovetail.errors import UnknownNameError

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class TrainerCallback:
    """Plato's trainer callback: every event gets the trainer and its configuration.

    Step events count updates, as in plato: within an accumulation window only the last batch fires
    `on_train_step_end`. `batch` is the index of the batch in the epoch, not its content.

    Example:
        >>> class PrintLoss(TrainerCallback):
        ...     def on_train_step_end(self, trainer, config, batch=None, loss=None, **kwargs):
        ...         print(f"batch {batch}: {loss:.3f}")
    """

    def on_train_run_start(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Before the first batch of a run."""

    def on_train_run_end(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
        """After the last batch of a run."""

    def on_train_epoch_start(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
        """After an epoch."""

    def on_train_step_start(
        self, trainer: Any, config: Mapping[str, Any], batch: int | None = None, **kwargs: Any
    ) -> None:
        """Before a training batch."""

    def on_train_step_end(
        self, trainer: Any, config: Mapping[str, Any], batch: int | None = None, loss: Any = None, **kwargs: Any
    ) -> None:
        """After an update, with the detached loss of its last batch."""


class PlatoAdapter(Callback):
    """Calls a `TrainerCallback` at our events."""

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
            self.callback.on_train_step_end(
                context.run.trainer, context.config, batch=context.progress.batch - 1, loss=output["loss"].detach()
            )


_EVENTS = frozenset(name for kind in (Callback, TrainerCallback) for name in vars(kind) if name.startswith("on_"))


class CallbackHandler(Callbacks):
    """A list of callbacks with plato's methods, whose events are called by name.

    Several callbacks of one class are welcome, and an error inside a callback stays what it is.

    Example:
        >>> class Greet(TrainerCallback):
        ...     def on_train_run_start(self, trainer, config, **kwargs):
        ...         print("hello", trainer)
        >>> handler = CallbackHandler([Greet])
        >>> handler.call_event("on_train_run_start", "trainer", {})
        hello trainer
        >>> handler.callback_list
        ['Greet']
    """

    @property
    def callback_list(self) -> list[str]:
        """The names of the callbacks' classes, in order."""
        return [type(target).__name__ for target in self._targets()]

    def add_callback(self, callback: Any) -> None:
        """Append one callback, a class or an instance."""
        self.add(callback)

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Append several callbacks."""
        self.add(*callbacks)

    def clear_callbacks(self) -> None:
        """Forget all callbacks."""
        self.remove(*self)

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call an event, of plato's names or ours, on every callback that has it.

        Raises:
            UnknownNameError: No callback could have such an event.
        """
        targets = [target for target in self._targets() if getattr(type(target), event, None) is not None]
        if not targets and event not in _EVENTS:
            raise UnknownNameError("event", event, _EVENTS)
        for target in targets:
            getattr(target, event)(*args, **kwargs)

    def _targets(self) -> list[Callback | TrainerCallback]:
        return [callback.callback if isinstance(callback, PlatoAdapter) else callback for callback in self]
