"""Detection of methods, written for another library, that would have no effect here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError


def reject_lost_overrides(kind: type[Any], answers: Mapping[str, str]) -> None:
    """Raise if a class defines or inherits a method from outside of this library that is never called here.

    Args:
        kind: The class.
        answers: The replacement of each such method, by its name.

    Raises:
        ConfigError: The message has the class, the method and the replacement.

    Example:
        >>> class Server:
        ...     __module__ = "mine"
        ...     def aggregate_weights(self): ...
        >>> reject_lost_overrides(Server, {"aggregate_weights": "override Algorithm.aggregate"})
        Traceback (most recent call last):
        ...
        dovetail.errors.ConfigError: Server.aggregate_weights: it is never called here: override Algorithm.aggregate
    """
    for name, answer in answers.items():
        classes = [base for base in kind.__mro__ if name in vars(base)]
        # If a class of this library defines the method as well, this library calls it.
        if classes and not any(map(is_ours, classes)):
            raise ConfigError(f"{kind.__name__}.{name}: it is never called here: {answer}")


def defines(piece: Any, name: str) -> bool:
    """Return whether a method of an object was defined outside of this library, in its class or on itself.

    Example:
        >>> class Mine(dict):
        ...     __module__ = "mine"
        ...     def get(self, key): ...
        >>> defines(Mine(), "get")
        True
    """
    if name in vars(piece):
        return True
    return not is_ours(next((base for base in type(piece).__mro__ if name in vars(base)), defines))


def is_ours(definition: Any) -> bool:
    """Return whether a class or function belongs to this library."""
    return str(definition.__module__).partition(".")[0] == "dovetail"
