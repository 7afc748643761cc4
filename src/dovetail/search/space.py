"""Search space of an experiment: constant hyperparameters, and ranges to search."""

from __future__ import annotations

import copy
import difflib
import itertools
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.checks import Key, Problem, Problems, Refused, number, one_of, read_section, whole
from dovetail.errors import ConfigError
from dovetail.extras import require

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MAX_GRID = 100_000
"""The largest size of a grid, which is built as a whole."""


class Space:
    """The hyperparameters of an experiment.

    A hyperparameter is a bare value, a mapping with a `type` (`const`, `int`, `double`, `log`, `categorical`), or a
    mapping of further ones. Every searched hyperparameter has a flat, dotted name, which is also its name in the study.

    Args:
        hyperparameters: The section of the configuration.
        problems: A list to which mistakes are appended, with their keys in the section; None means to raise them.

    Attributes:
        parameters: The searched hyperparameters by dotted name, in the order of the file.

    Raises:
        ConfigErrors: The section has mistakes; the message lists all of them.

    Example:
        >>> space = Space({"lr": {"type": "log", "minval": -3, "maxval": -1, "count": 3}, "net": {"width": 64}})
        >>> space.grid()
        [{'lr': 0.001}, {'lr': 0.01}, {'lr': 0.1}]
        >>> space.hparams({"lr": 0.01})
        {'lr': 0.01, 'net': {'width': 64}}
    """

    def __init__(self, hyperparameters: Mapping[str, Any], problems: list[Problem] | None = None) -> None:
        self.parameters: dict[str, Parameter] = {}
        self._problems: list[Problem] = [] if problems is None else problems
        self._tree = self._read(hyperparameters, ())
        if problems is None:
            found = Problems({})
            found.extend(self._problems, "hyperparameters")
            found.raise_any()

    def sample(self, generator: random.Random) -> dict[str, Any]:
        """Return one random value per parameter, by flat names."""
        return {name: parameter.at(generator.random()) for name, parameter in self.parameters.items()}

    def grid(self) -> list[dict[str, Any]]:
        """Return the flat parameters of all points; the last parameter in the file changes fastest.

        Raises:
            ConfigErrors: A range has no `count`, or there are too many points.
        """
        found = Problems({})
        found.extend(self.grid_problems())
        found.raise_any()
        axes = [parameter.grid() for parameter in self.parameters.values()]
        return [dict(zip(self.parameters, point, strict=True)) for point in itertools.product(*axes)]

    def grid_problems(self) -> Iterator[Problem]:
        """Yield the reasons why there is no grid, with keys from the top of the configuration."""
        size = 1
        for parameter in self.parameters.values():
            if parameter.count is None:
                yield Problem(
                    ("hyperparameters", *parameter.keys),
                    f"a grid needs 'count', the number of values to try, with type {parameter.kind!r}",
                )
            else:
                size *= parameter.count
        if size > MAX_GRID:
            yield Problem(("hyperparameters",), f"expected a grid of at most {MAX_GRID} points, got {size:,}")

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the ranges as Optuna's distributions, by flat name."""
        return {name: parameter.distribution() for name, parameter in self.parameters.items()}

    def hparams(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters of a trial for flat parameters: nested as in the file, with the constants.

        Raises:
            ConfigError: The names differ from the names in this space.
        """
        if params.keys() != self.parameters.keys():
            expected, given = (", ".join(names) or "none" for names in (self.parameters, params))
            raise ConfigError(f"parameters: expected {expected}, got {given}")
        return {name: self._filled(node, params) for name, node in self._tree.items()}

    def _filled(self, node: Any, params: Mapping[str, Any]) -> Any:
        if isinstance(node, Parameter):
            return node.given(params[node.name])
        # A copy, because a trial could change a list in place for all later trials.
        if isinstance(node, _Constant):
            return copy.deepcopy(node.value)
        return {name: self._filled(part, params) for name, part in node.items()}

    def _read(self, section: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        return {name: self._node(value, (*keys, name)) for name, value in section.items()}

    def _node(self, value: Any, keys: tuple[str, ...]) -> Any:
        if not isinstance(value, Mapping):
            return _Constant(value)
        if "type" not in value:
            self._problems += [Problem((*keys, *at), sentence) for at, sentence in _looks_typed(value)]
            return self._read(value, keys)
        problems: list[Problem] = []
        node = _leaf(value, keys, problems)
        self._problems += [Problem((*keys, *problem.keys), problem.sentence) for problem in problems]
        if isinstance(node, Parameter):
            if node.name in self.parameters:
                self._problems.append(Problem(keys, f"the name {node.name!r} occurs twice"))
            self.parameters[node.name] = node
        return node


@dataclass(frozen=True)
class _Constant:
    value: Any


@dataclass(frozen=True)
class Parameter(ABC):
    """A range to search.

    Attributes:
        keys: The keys that lead to it from the top of the hyperparameters.
        count: How many of its values a grid tries; None if the file does not set it.
    """

    keys: tuple[str, ...]
    count: int | None

    kind = ""
    is_numeric = True

    @property
    def name(self) -> str:
        """The flat name."""
        return ".".join(self.keys)

    @abstractmethod
    def at(self, place: float) -> Any:
        """Return the value at a position from 0 to 1; a uniform position gives a random value."""

    @abstractmethod
    def place(self, value: Any) -> float:
        """Return the position of a value, from 0 to 1."""

    @abstractmethod
    def grid(self) -> list[Any]:
        """Return the values of a grid."""

    @abstractmethod
    def distribution(self) -> BaseDistribution:
        """Return the range as Optuna's distribution."""

    @abstractmethod
    def scaled(self, value: Any, factor: float) -> Any:
        """Return a value times a factor, within the range; values that are not numbers are unchanged."""

    def given(self, value: Any) -> Any:
        """Return the value that a trial gets for a flat value."""
        return value


@dataclass(frozen=True)
class Integer(Parameter):
    """Whole numbers, both ends included.

    Example:
        >>> Integer(("layers",), 3, 1, 3).grid()
        [1, 2, 3]
    """

    minval: int
    maxval: int

    kind = "int"

    def at(self, place: float) -> int:
        """Return the value at a position; every value has the same share."""
        size = self.maxval - self.minval + 1
        return self.minval + min(int(place * size), size - 1)

    def place(self, value: int) -> float:
        # The middle of the value's share, so that `at(place(value))` is the value again.
        return (value - self.minval + 0.5) / (self.maxval - self.minval + 1)

    def grid(self) -> list[int]:
        """Return evenly spaced values, rounded."""
        span, count = self.maxval - self.minval, self.count or 0
        if count == 1:
            return [self.minval + (span + 1) // 2]
        # Integer arithmetic, because large numbers are not exact as floats.
        return [self.minval + (2 * index * span + count - 1) // (2 * (count - 1)) for index in range(count)]

    def distribution(self) -> BaseDistribution:
        return _distribution("IntDistribution", self.minval, self.maxval)

    def scaled(self, value: int, factor: float) -> int:
        """Return the value times a factor, changed by at least 1."""
        moved = round(value * factor)
        # Otherwise a small number such as 1 would never change.
        if moved == value and factor != 1:
            moved += 1 if factor > 1 else -1
        return max(self.minval, min(moved, self.maxval))


class _Continuous(Parameter):
    """Numbers between two ends, on a linear or a logarithmic scale."""

    @property
    @abstractmethod
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value."""

    def grid(self) -> list[float]:
        """Return values at evenly spaced positions; the middle one if `count` is 1."""
        count = self.count or 0
        return [self.at(0.5 if count == 1 else index / (count - 1)) for index in range(count)]

    def scaled(self, value: float, factor: float) -> float:
        return self._within(value * factor)

    def _within(self, value: float) -> float:
        low, high = self.ends
        return max(low, min(value, high))


@dataclass(frozen=True)
class Double(_Continuous):
    """Numbers.

    Example:
        >>> Double(("dropout",), 3, 0.0, 0.5).grid()
        [0.0, 0.25, 0.5]
    """

    minval: float
    maxval: float

    kind = "double"

    @property
    def ends(self) -> tuple[float, float]:
        return self.minval, self.maxval

    def at(self, place: float) -> float:
        return self._within(self.minval + place * (self.maxval - self.minval))

    def place(self, value: float) -> float:
        return _share(value, self.minval, self.maxval)

    def distribution(self) -> BaseDistribution:
        return _distribution("FloatDistribution", *self.ends)


@dataclass(frozen=True)
class Log(_Continuous):
    """Powers of a base; the exponent is uniform. The flat value is the power itself.

    Example:
        >>> Log(("lr",), 3, 10.0, -3.0, -1.0).grid()
        [0.001, 0.01, 0.1]
    """

    base: float
    minval: float
    maxval: float

    kind = "log"

    @property
    def ends(self) -> tuple[float, float]:
        return self._power(0), self._power(1)

    def at(self, place: float) -> float:
        # Rounding of the power may leave the range, which Optuna rejects.
        return self._within(self._power(place))

    def place(self, value: float) -> float:
        return _share(math.log(value) / math.log(self.base), self.minval, self.maxval)

    def distribution(self) -> BaseDistribution:
        return _distribution("FloatDistribution", *self.ends, log=True)

    def _power(self, place: float) -> float:
        return math.pow(self.base, self.minval + place * (self.maxval - self.minval))


@dataclass(frozen=True)
class Categorical(Parameter):
    """A list of values. The flat value of a list or mapping is its JSON, because a study stores plain values only.

    Example:
        >>> layers = Categorical(("layers",), 2, {"[64]": [64], "[64, 32]": [64, 32]})
        >>> layers.grid(), layers.given("[64, 32]")
        (['[64]', '[64, 32]'], [64, 32])
    """

    choices: Mapping[Any, Any]

    kind = "categorical"
    is_numeric = False

    def at(self, place: float) -> Any:
        """Return the choice at a position; all choices have the same share."""
        choices = list(self.choices)
        return choices[min(int(place * len(choices)), len(choices) - 1)]

    def place(self, value: Any) -> float:
        return (list(self.choices).index(value) + 0.5) / len(self.choices)

    def grid(self) -> list[Any]:
        return list(self.choices)

    def distribution(self) -> BaseDistribution:
        return _distribution("CategoricalDistribution", tuple(self.choices))

    def scaled(self, value: Any, factor: float) -> Any:
        """Return the choice unchanged."""
        return value

    def given(self, value: Any) -> Any:
        """Return the choice as the file contains it."""
        return copy.deepcopy(self.choices[value])


# Reading


def _exponents(base: float) -> Any:
    """Return a check that accepts exponents whose power is a positive float."""

    def check(value: Any) -> float:
        exponent: float = number()(value)
        try:
            power = math.pow(base, exponent)
        except OverflowError:
            power = math.inf
        if not 0 < power < math.inf:
            raise Refused(f"expected an exponent of {base:g} whose power fits a float")
        return exponent

    return check


def _values(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise Refused("expected a list of values")
    flat = [_flat(choice) for choice in value]
    if any(choice != choice for choice in flat):
        raise Refused("expected values other than NaN")
    if len(set(flat)) < len(flat):
        # True equals 1 and 1.0: a study could not distinguish them.
        raise Refused("expected every value once")
    return value


_COUNT = {"count": Key(whole(1), None)}
_KINDS: dict[str, Any] = {
    "const": lambda given: {"val": Key(lambda value: value)},
    "int": lambda given: {"minval": Key(whole()), "maxval": Key(whole()), **_COUNT},
    "double": lambda given: {"minval": Key(number()), "maxval": Key(number()), **_COUNT},
    "log": lambda given: {
        "base": Key(_base, 10.0),
        "minval": Key(_exponents(_base_of(given))),
        "maxval": Key(_exponents(_base_of(given))),
        **_COUNT,
    },
    "categorical": lambda given: {"vals": Key(_values)},
}


def _base(value: Any) -> float:
    found: float = number()(value)
    if found <= 1:
        raise Refused("expected a number above 1")
    return found


def _base_of(given: Mapping[str, Any]) -> float:
    try:
        return _base(given["base"]) if given.get("base") is not None else 10.0
    except Refused:
        return 10.0


def _leaf(value: Mapping[str, Any], keys: tuple[str, ...], problems: list[Problem]) -> Any:
    kind = value["type"]
    try:
        one_of(*_KINDS)(kind)
    except Refused as refusal:
        problems.append(Problem(("type",), f"{refusal}, got {kind!r}"))
        return None
    table = {"type": Key(lambda given: given), **_KINDS[kind](value)}
    # The value of a constant may be null.
    if kind == "const" and "val" in value:
        # Checks only the names of the keys, with a placeholder in place of the value.
        read_section({**value, "val": 0}, table, problems)
        return _Constant(value["val"])
    values = read_section(value, table, problems)
    if problems:
        return None
    if kind == "categorical":
        choices = {_flat(choice): choice for choice in values["vals"]}
        return Categorical(keys, len(choices), choices)
    low, high, count = values["minval"], values["maxval"], values["count"]
    if low > high:
        problems.append(Problem(("maxval",), f"expected at least minval, {low}, got {high}"))
        return None
    if math.isinf(high - low):
        problems.append(Problem(("maxval",), f"expected a range whose size fits a float, got {low:g} to {high:g}"))
        return None
    if kind == "int":
        return Integer(keys, count and min(count, high - low + 1), low, high)
    if kind == "double":
        return Double(keys, count, low, high)
    return Log(keys, count, values["base"], low, high)


def _looks_typed(value: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with a mapping that looks like a range without a `type`."""
    for name, part in value.items():
        if isinstance(part, str) and part in _KINDS and difflib.get_close_matches(name.lower(), ["type"], cutoff=0.5):
            yield Problem((name,), f"unknown key: did you mean 'type'? (known: type, {', '.join(_KINDS[part](value))})")
            return
    if {"minval", "maxval", "vals"} & value.keys():
        yield Problem(("type",), f"missing: one of {', '.join(_KINDS)}")


def _flat(choice: Any) -> Any:
    return json.dumps(choice) if isinstance(choice, (list, dict)) else choice


def _share(value: float, low: float, high: float) -> float:
    return 0.5 if low == high else max(0.0, min((value - low) / (high - low), 1.0))


def _distribution(kind: str, *arguments: Any, **options: Any) -> BaseDistribution:
    found: BaseDistribution = getattr(require("optuna.distributions", "search"), kind)(*arguments, **options)
    return found
