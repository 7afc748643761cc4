"""Callback built from functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.callbacks.base import FOREIGN_HOOKS, HOOKS, Callback
from dovetail.errors import ConfigError, UnknownNameError


class LambdaCallback(Callback):
    """A callback that calls functions, given by the names of their hooks.

    Args:
        hooks: Functions by the name of their hook, each with the arguments of that hook.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> callback = LambdaCallback(on_epoch_end=lambda context, metrics: print(metrics))
        >>> callback.on_epoch_end(TrainingContext(), {"train_loss": 0.5})
        {'train_loss': 0.5}
    """

    def __new__(cls, **hooks: Callable[..., Any]) -> LambdaCallback:
        """Create a class with exactly these hooks, because the loop calls only hooks that a class overrides."""
        for name, function in hooks.items():
            if name not in HOOKS:
                raise UnknownNameError("hook", name, HOOKS, FOREIGN_HOOKS)
            if not callable(function):
                raise ConfigError(f"LambdaCallback: {name}: expected a function, got {function!r}")
        # Static methods, because the functions take no `self`.
        functions = {name: staticmethod(function) for name, function in hooks.items()}
        return super().__new__(type(cls.__name__, (cls,), {"__module__": cls.__module__, **functions}))

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        self._hooks = hooks

    def __reduce__(self) -> tuple[partial[LambdaCallback], tuple[()]]:
        # Another process creates its own class.
        return partial(LambdaCallback, **self._hooks), ()
