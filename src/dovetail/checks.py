"""Checks of the keys of a configuration, which report all mistakes at once."""

from __future__ import annotations

import copy
import difflib
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dovetail.config import locate, parse_config
from dovetail.errors import ConfigError
from dovetail.units import TrainUnit, parse_unit

_Keys = tuple[str | int, ...]

Check = Callable[[Any], Any]
"""A function that returns the value of a key in its final type, or raises `Refused` with what was expected."""


_MAX_SHOWN = 50

LIMIT = 2**53
"""The largest number up to which floats represent every whole number."""


class ConfigErrors(ConfigError):  # noqa: N818 - it holds several errors
    r"""All mistakes of a configuration.

    Attributes:
        problems: One sentence per mistake, with file, line and column if the value is from a file.

    Example:
        >>> str(ConfigErrors(["a.yaml:1:1: name: expected text, got 1", "a.yaml:2:1: searcher: missing"]))
        'a.yaml:1:1: name: expected text, got 1\na.yaml:2:1: searcher: missing'
    """

    def __init__(self, problems: list[str]) -> None:
        more = len(problems) - _MAX_SHOWN
        shown = [*problems[:_MAX_SHOWN], f"and {more:,} more mistakes"] if more > 1 else problems
        super().__init__("\n".join(shown))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would otherwise pass the joined message as the list of problems.
        return type(self), (self.problems,)


class Refused(ValueError):  # noqa: N818 - raised as part of a message
    """Raised by a check; the message is what was expected."""


class Problem(NamedTuple):
    """A mistake, and the keys that lead to it from the top of the configuration."""

    keys: _Keys
    sentence: str


class Problems:
    """The mistakes found so far in one configuration.

    Args:
        config: The configuration. If it is from a file, it has the position of each key.
        given: Settings of the command line by their keys; an error about such a key shows the setting.

    Example:
        >>> problems = Problems({})
        >>> problems.add(("searcher", "name"), "missing")
        >>> problems.raise_any()
        Traceback (most recent call last):
        ...
        dovetail.checks.ConfigErrors: searcher.name: missing
    """

    def __init__(self, config: Mapping[str, Any], given: Mapping[_Keys, str] | None = None) -> None:
        self._config = config
        self._given = dict(given or {})
        self._found: list[str] = []

    def add(self, keys: _Keys, sentence: str) -> None:
        """Add a mistake."""
        # From the longest path to the shortest: a setting may have set the key itself or a section around it.
        for length in range(len(keys), 0, -1):
            if (setting := self._given.get(keys[:length])) is not None:
                # The setting contains all keys of the mistake, or only the first ones.
                path = "" if length == len(keys) else f"{'.'.join(map(str, keys))}: "
                self._found.append(f"{setting}: {path}{sentence}")
                return
        self._found.append(f"{locate(self._config, *keys)}: {sentence}" if keys else sentence)

    def extend(self, problems: Iterable[Problem], *above: str) -> None:
        """Add the mistakes of a section below some keys."""
        for problem in problems:
            self.add((*above, *problem.keys), problem.sentence)

    def __len__(self) -> int:
        return len(self._found)

    def raise_any(self) -> None:
        """Raise all mistakes as one error, if there are any."""
        if self._found:
            raise ConfigErrors(self._found)


REQUIRED: Any = object()
"""The default of a required key."""


@dataclass(frozen=True)
class Key:
    """The check and the default of a key.

    Attributes:
        check: A function that returns the final value or raises `Refused`.
        default: The value if the key is missing or null.
        hint: What to do if a required key is missing.
    """

    check: Check
    default: Any = REQUIRED
    hint: str = ""


def read_section(
    section: Mapping[str, Any], keys: Mapping[str, Key], problems: list[Problem], ignored: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the values of a section, with defaults, and append its mistakes to `problems`.

    A wrong value is replaced by the default of its key, or left out. Keys in `ignored` are neither read nor mistakes.

    Example:
        >>> problems = []
        >>> read_section({"max_trails": 3}, {"max_trials": Key(whole(1), default=1)}, problems)
        {'max_trials': 1}
        >>> problems[0].sentence
        "unknown key: did you mean 'max_trials'? (known: max_trials)"
    """
    skipped = set(ignored)
    problems += [unknown_key(name, keys) for name in section if name not in keys and name not in skipped]
    values = {}
    for name, key in keys.items():
        given = section.get(name)
        if given is None:
            if key.default is REQUIRED:
                problems.append(Problem((name,), f"missing: {key.hint}" if key.hint else "missing"))
            else:
                # A copy, because the caller may change a default that is a list or a mapping.
                values[name] = copy.copy(key.default)
            continue
        try:
            values[name] = key.check(given)
        except Refused as refusal:
            problems.append(Problem((name,), f"{refusal}, got {_shown(given)}"))
            if key.default is not REQUIRED:
                # Continue with the default, so that all mistakes of the section are found at once.
                values[name] = copy.copy(key.default)
    return values


def unknown_key(name: str, known: Iterable[str]) -> Problem:
    """Return the problem of an unknown key, with the nearest known key."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f": did you mean {nearest[0]!r}?" if nearest else ""
    return Problem((name,), f"unknown key{hint} (known: {', '.join(names)})")


def override(config: Any, setting: str, given: dict[_Keys, str]) -> list[Problem]:
    """Set one key of a configuration by a text such as `trainer.rounds=4`, and store the text in `given`.

    Example:
        >>> config, given = {}, {}
        >>> override(config, "trainer.rounds=4", given)
        []
        >>> config, given
        ({'trainer': {'rounds': 4}}, {('trainer', 'rounds'): 'trainer.rounds=4'})
    """
    name, equals, value = setting.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        return [Problem((), f"{setting}: expected a setting such as section.key=4, got {setting!r}")]
    try:
        # On a separate line, because a value may be a block, as in a file.
        parsed = dict(parse_config(f"value: {value}\n", setting))
    except ConfigError:
        parsed = {}
    if parsed.keys() != {"value"}:
        return [Problem((), f"{setting}: expected a value such as 4, relu or [1, 2], got {value!r}: quote it")]
    section = config
    for depth, key in enumerate(keys[:-1]):
        # A section that is missing or empty in the file.
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            above = ".".join(keys[: depth + 1])
            return [Problem((), f"{setting}: expected {above} to be 'key: value' lines, got {section!r}")]
    section[keys[-1]] = parsed["value"]
    given[keys] = setting
    return []


# Checks


def text(value: Any) -> str:
    """Accept text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise Refused("expected text")
    return value


def flag(value: Any) -> bool:
    """Accept true and false."""
    if not isinstance(value, bool):
        raise Refused("expected true or false")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Accept 'key: value' lines."""
    if not isinstance(value, Mapping):
        raise Refused("expected 'key: value' lines")
    return dict(value)


def whole(least: int = -LIMIT, most: int = LIMIT) -> Check:
    """Accept whole numbers, such as 1000 or 1e3, within bounds."""
    bounds = f" from {least} to {most}" if most < LIMIT else f" of at least {least}" if least > -LIMIT else ""

    def check(value: Any) -> int:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        # Python counts true and false as whole numbers.
        if isinstance(value, bool) or not is_whole:
            raise Refused(f"expected a whole number{bounds}")
        if not least <= value <= most:
            raise Refused(f"expected a whole number{' that a float can hold' if abs(value) > LIMIT else bounds}")
        return int(value)

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    """Accept finite numbers within bounds."""
    bounds = (
        "" if math.isinf(least) else f" of at least {least:g}" if math.isinf(most) else f" from {least:g} to {most:g}"
    )

    def check(value: Any) -> float:
        try:
            found = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
        except OverflowError:
            found = math.nan
        if not math.isfinite(found) or not least <= found <= most:
            raise Refused(f"expected a number{bounds}")
        return found

    return check


def one_of(*names: str) -> Check:
    """Accept some names."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            nearest = difflib.get_close_matches(str(value), names, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise Refused(f"expected one of {', '.join(names)}{hint}")
        return value

    return check


def list_of(check: Check, least: int = 0) -> Check:
    """Accept lists with a smallest length, whose items another check accepts."""

    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) < least:
            raise Refused(f"expected a list of at least {least}" if least else "expected a list")
        return list(check_items(value, check))

    return check_all


def unit(least: int) -> Check:
    """Accept lengths such as `{epochs: 3}`; a bare number counts batches."""

    def check(value: Any) -> TrainUnit:
        given = value if isinstance(value, Mapping) else {"batches": value}
        try:
            # Several keys, a wrong number (`Refused`) and an unknown unit are all ValueErrors.
            ((name, count),) = given.items()
            return parse_unit({name: whole(least)(count)})
        except ValueError as error:
            raise Refused(
                "expected one of epochs, batches, records and updates with a whole number, such as {epochs: 3}"
            ) from error

    return check


def check_items(values: Sequence[Any], check: Check) -> Iterator[Any]:
    """Yield the items of a list as a check returns them; an error has the position of the item."""
    for position, value in enumerate(values):
        try:
            yield check(value)
        except Refused as refusal:
            raise Refused(f"{refusal} as item {position + 1}") from refusal


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    return reprlib.repr(value)
