"""Error classes for mistakes of the user, and helpers for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DovetailError",
    "FederationError",
    "InvalidHP",
    "MissingExtraError",
    "NonFiniteLossError",
    "UnknownNameError",
    "add_note",
    "expect",
]


class DovetailError(Exception):
    """Base class of all errors that Dovetail raises."""


class ConfigError(DovetailError, ValueError):
    """An option or a configuration value is invalid."""


class UnknownNameError(ConfigError):
    """A name is unknown.

    The message contains the given name, the nearest known name and all accepted names.

    Args:
        kind: The kind of object that the name refers to, such as `optimizer`.
        given: The name.
        known: The names that are accepted.
        answers: Replacements for names that other libraries use: a known name, or a sentence.

    Example:
        >>> raise UnknownNameError("optimizer", "Adm", ["Adam", "SGD"])
        Traceback (most recent call last):
        ...
        dovetail.errors.UnknownNameError: unknown optimizer 'Adm': did you mean 'Adam'? (known: Adam, SGD)
    """

    def __init__(self, kind: str, given: str, known: Iterable[str], answers: Mapping[str, str] | None = None) -> None:
        names = sorted(known)
        # The exact name of another library is a better hint than a similar spelling.
        answer = (answers or {}).get(given.lower())
        if answer is None:
            by_spelling = {name.lower(): name for name in names}
            # "acc" means "accuracy", though "mcc" has more letters in common.
            longer = [name for name in by_spelling if len(given) > 2 and name.startswith(given.lower())]
            similar = difflib.get_close_matches(given.lower(), list(by_spelling), n=1, cutoff=0.5)
            nearest = longer if len(longer) == 1 else similar
            answer = by_spelling[nearest[0]] if nearest else None
        hint = "" if answer is None else f": did you mean {answer!r}?" if answer in names else f": {answer}"
        others = f"known: {', '.join(names)}" if names else "there are none"
        super().__init__(f"unknown {kind} {given!r}{hint} ({others})")


class InvalidHP(DovetailError):  # noqa: N818 - the name that trials know
    """Raised by a trial whose hyperparameters cannot be combined; a search continues with other trials."""


class DataError(DovetailError, ValueError):
    """The data has a form that the trainer cannot use."""


class NonFiniteLossError(DovetailError, ArithmeticError):
    """The training loss became NaN or infinite."""


class CheckpointError(DovetailError):
    """A checkpoint could not be written or found, or is damaged."""


class FederationError(DovetailError, RuntimeError):
    """All clients of a federated round failed; the message shows the first failure."""


class MissingExtraError(DovetailError, ImportError):
    """A feature needs a package that is not installed; the message has the extra to install."""


def expect(is_valid: bool, name: str, expected: str, given: object) -> None:
    """Raise an error if a value is not valid.

    Args:
        is_valid: The result of the check.
        name: The name of the argument or of the setting.
        expected: The values that are accepted.
        given: The value.

    Raises:
        ConfigError: The value is not valid.

    Example:
        >>> expect(1.5 <= 1, "momentum", "a number from 0 to 1", 1.5)
        Traceback (most recent call last):
        ...
        dovetail.errors.ConfigError: momentum: expected a number from 0 to 1, got 1.5
    """
    if not is_valid:
        raise ConfigError(f"{name}: expected {expected}, got {given!r}")


def add_note(error: BaseException, note: str) -> None:
    """Attach a sentence to an error without changing its type or traceback. Python 3.10 does not print it."""
    # Not `error.add_note`, which Python 3.10 does not have.
    notes: list[str] = getattr(error, "__notes__", [])
    error.__notes__ = [*notes, note]


def misspelled_methods(subclass: type, base: type) -> Iterator[tuple[str, str]]:
    """Yield methods of a subclass with nearly the name of a method of its base class, and this name.

    Such a method would never be called, without any message.

    Example:
        >>> class Base:
        ...     def build_validation_data_loader(self): ...
        >>> class Mine(Base):
        ...     def build_validation_dataloader(self): ...
        >>> list(misspelled_methods(Mine, Base))
        [('build_validation_dataloader', 'build_validation_data_loader')]
    """
    # Methods that the subclass does not override: only these can have been meant.
    free = [
        name
        for name, value in vars(base).items()
        if callable(value) and not name.startswith("_") and getattr(subclass, name) is value
    ]
    for cls in subclass.__mro__[: subclass.__mro__.index(base)]:
        for name, value in vars(cls).items():
            if callable(value) and not name.startswith("_") and not hasattr(base, name):
                nearest = difflib.get_close_matches(name, free, n=1, cutoff=0.85)
                if nearest:
                    yield name, nearest[0]
