"""Callback list with plato's methods, which calls events by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail.callbacks.base import Callback, Callbacks
from dovetail.callbacks.trainer import PlatoAdapter, TrainerCallback
from dovetail.errors import UnknownNameError

_EVENTS = frozenset(name for kind in (Callback, TrainerCallback) for name in vars(kind) if name.startswith("on_"))


class CallbackHandler(Callbacks):
    """A list of callbacks with plato's methods, which calls events by name.

    Several callbacks of one class are allowed, and an error inside of a callback keeps its type. In the handler of a
    trainer, the hooks of its class and of its strategies are part of the computation: they are not listed, and
    `clear_callbacks` keeps them.

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
        """Remove all callbacks."""
        self.remove(*(callback for callback in self if not callback.is_part_of_trainer))

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call an event, by plato's name or ours, on every callback that has it.

        Raises:
            UnknownNameError: The event is unknown.
        """
        # Users may define and call their own events, so one callback that has an event makes it valid.
        targets = [target for target in self._targets() if getattr(type(target), event, None) is not None]
        if not targets and event not in _EVENTS:
            raise UnknownNameError("event", event, _EVENTS)
        for target in targets:
            getattr(target, event)(*args, **kwargs)

    def _targets(self) -> list[Callback | TrainerCallback]:
        # plato's users expect their own object in place of the adapter around it.
        listed = (callback for callback in self if not callback.is_part_of_trainer)
        return [callback.callback if isinstance(callback, PlatoAdapter) else callback for callback in listed]
