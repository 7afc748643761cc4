"""Registry of named objects, for configurations and for additions by users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Generic, TypeVar, overload

from dovetail.errors import ConfigError, UnknownNameError

__all__ = ["Registry"]

T = TypeVar("T")
P = TypeVar("P")


class Registry(Generic[T]):
    """A table of objects of one kind, by name.

    Args:
        kind: The kind of the objects, for messages.
        built_in: Returns the objects of this library; called when a name is first used.
        answers: Replacements for names of other libraries: a name of this registry, or a sentence.

    Example:
        >>> colours = Registry("colour", lambda: {"red": 1})
        >>> colours.register("blue", 2)
        2
        >>> colours.get("blue"), colours.names()
        (2, ['blue', 'red'])
    """

    def __init__(
        self, kind: str, built_in: Callable[[], Mapping[str, T]] = dict, answers: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self._answers = answers
        self._built_in = cache(built_in)
        self._own: dict[str, T] = {}

    @overload
    def register(self, name: str, piece: P) -> P: ...
    @overload
    def register(self, name: str) -> Callable[[P], P]: ...
    def register(self, name: str, piece: Any = None) -> Any:
        """Register an object under a name; without the object, return a decorator.

        Raises:
            ConfigError: The name is taken.
        """
        if piece is None:
            return lambda decorated: self.register(name, decorated)
        if name in self._table():
            raise ConfigError(f"{self.kind} {name!r} is registered already: choose another name")
        self._own[name] = piece
        return piece

    def get(self, name: str) -> T:
        """Return the object of a name.

        Raises:
            UnknownNameError: The name is unknown; the message has the nearest one.
        """
        # One table after the other: joining them for every lookup would cost more.
        for table in (self._own, self._built_in()):
            if name in table:
                return table[name]
        raise UnknownNameError(self.kind, name, self._table(), self._answers)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._table())

    def _table(self) -> dict[str, T]:
        return {**self._built_in(), **self._own}
