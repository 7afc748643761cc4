"""Registry of trainers, losses, optimizers and schedulers by the names of a configuration."""

from __future__ import annotations

from typing import Any

from dovetail.errors import ConfigError
from dovetail.registry import Registry
from dovetail.trainers import basic, composable
from dovetail.trainers.catalog import losses, optimizers, schedulers

__all__ = ["get", "losses", "names", "optimizers", "register", "schedulers", "trainers"]

trainers: Registry[type[Any]] = Registry(
    "trainer", lambda: {"basic": basic.Trainer, "composable": composable.ComposableTrainer}
)


def get(name: str | None = None, **arguments: Any) -> Any:
    """Return the class of a trainer by its name; with arguments such as `model=…`, a trainer of this class.

    Args:
        name: A name in `names()`. With arguments it is `"basic"` by default. plato reads it from its configuration.
        arguments: Arguments of the class.

    Example:
        >>> get("composable").__name__
        'ComposableTrainer'
        >>> import torch
        >>> get(model=torch.nn.Linear(2, 1), verbose=False).model
        Linear(in_features=2, out_features=1, bias=True)
    """
    if name is None and not arguments:
        raise ConfigError(f"get: give the name of a trainer ({', '.join(names())}), or its arguments, get(model=…)")
    found = trainers.get("basic" if name is None else name)
    return found(**arguments) if arguments else found


names = trainers.names
register = trainers.register
