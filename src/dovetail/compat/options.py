"""Options of a trainer as attributes that can be read and assigned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dovetail.errors import ConfigError


class OptionAttribute:
    """An option of a trainer as an attribute.

    Args:
        name: The option.
        read: A function that returns the value of the attribute; None means the option itself.
    """

    def __init__(self, name: str, read: Callable[[Any], Any] | None = None) -> None:
        self.name = name
        self._read = read

    def __get__(self, trainer: Any, owner: type[Any] | None = None) -> Any:
        if trainer is None:
            return self
        return getattr(trainer.options, self.name) if self._read is None else self._read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        # A subclass assigns before `super().__init__`, which creates the options and would overwrite the value.
        if "options" not in vars(trainer):
            raise ConfigError(f"{self.name}: this is an option; pass it as a keyword to super().__init__()")
        setattr(trainer.options, self.name, value)


def with_options(
    names: Iterable[str], reads: Mapping[str, Callable[[Any], Any]] | None = None
) -> Callable[[type[Any]], Any]:
    """Return a decorator that adds options as attributes to a trainer class.

    Args:
        names: The options.
        reads: Functions, by name, for attributes whose value is not the option itself.
    """

    def decorate(kind: type[Any]) -> Any:
        for name in names:
            setattr(kind, name, OptionAttribute(name, (reads or {}).get(name)))
        return kind

    return decorate
