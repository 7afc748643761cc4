"""Lengths, periods and schedules of training, and the counters that measure progress.

This module does not import torch: the command line reads units from files before it needs any tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, SupportsFloat, SupportsIndex

from dovetail.errors import ConfigError, UnknownNameError

__all__ = [
    "Batch",
    "Batches",
    "Epoch",
    "Epochs",
    "Progress",
    "Record",
    "Records",
    "Token",
    "Tokens",
    "TrainUnit",
    "Update",
    "Updates",
    "counted",
    "parse_unit",
]


@dataclass(slots=True)
class Progress:
    """The progress of training. Every counter is the number of *finished* items.

    Attributes:
        epoch: Full passes over the training data; also the index of the current epoch.
        batch: Batches of the current epoch.
        batches: Batches since the start of training.
        records: Samples since the start of training.
        updates: Real optimizer steps since the start of training. A step that a gradient scaler skipped and the
            earlier micro-batches of an accumulation window do not count.
        tokens: Tokens since the start of training, if steps count them: with `input_ids` in the batches, or with
            `num_tokens` in the output of `train_step`. It is up to date after every update if a length or period is in
            tokens, and else at every report, validation and checkpoint.
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0
    records: int = 0
    updates: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the counters from `state`."""
        for field in fields(self):
            # Checkpoints of earlier versions have no tokens.
            count = int(state.get(field.name, 0) if field.name == "tokens" else state[field.name])
            if not 0 <= count < 1 << 63:
                raise ValueError(f"{field.name}: expected a number from 0 to 2**63, got {count}")
            setattr(self, field.name, count)

    def copy(self) -> Progress:
        """Return a copy of the counters."""
        return Progress(self.epoch, self.batch, self.batches, self.records, self.updates, self.tokens)


@dataclass(frozen=True)
class TrainUnit:
    """A number of epochs, batches, records, updates or tokens: a length, a period, or a schedule.

    An integer is a length (`max_length=Epochs(10)`) or a period (`validation_period=Batches(100)`, due at every
    multiple; 0 is never due). A container is an explicit schedule: due at each number that it contains.

    Example:
        >>> Epochs(3).reached(Progress(epoch=3))
        True
        >>> Batches(100).due(Progress(batches=199), Progress(batches=200))
        True
        >>> Batches({5, 7}).due(Progress(batches=5), Progress(batches=6))
        False
    """

    value: int | Container[int]
    counter: ClassVar[str] = ""

    def __post_init__(self) -> None:
        name = type(self).__name__
        # Python counts a bool as a whole number, and text as a container.
        if isinstance(self.value, (bool, str, bytes)) or not isinstance(self.value, (int, Container)):
            raise ConfigError(f"{name}: expected a whole number or a container of them, got {self.value!r}")
        if isinstance(self.value, int) and self.value < 0:
            raise ConfigError(f"{name}: expected a number that is not negative, got {self.value}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    @property
    def length(self) -> int:
        """The number, for a unit that is used as a length."""
        if not isinstance(self.value, int):
            raise ConfigError(
                f"length: expected one whole number such as {type(self).__name__}(5), got the schedule {self!r}"
            )
        return self.value

    def count(self, progress: Progress) -> int:
        """Return the counter of `progress` that this unit measures."""
        return int(getattr(progress, self.counter))

    def reached(self, progress: Progress) -> bool:
        """Return whether training has reached this length."""
        return self.count(progress) >= self.length

    def due(self, before: Progress, now: Progress) -> bool:
        """Return whether a period or a scheduled number was passed between `before` and `now`."""
        first, last = self.count(before), self.count(now)
        if isinstance(self.value, int):
            # Also true if the counter skipped the multiple, as records do, which grow by a batch at a time.
            return self.value > 0 and first // self.value < last // self.value
        return any(number in self.value for number in range(first + 1, last + 1))


class Epochs(TrainUnit):
    """Full passes over the training data."""

    counter = "epoch"


class Batches(TrainUnit):
    """Items of the training loader."""

    counter = "batches"


class Records(TrainUnit):
    """Training samples."""

    counter = "records"


class Updates(TrainUnit):
    """Real optimizer steps."""

    counter = "updates"


class Tokens(TrainUnit):
    """Training tokens, if steps count them: with `input_ids` in the batches, or `num_tokens` in a step's output."""

    counter = "tokens"


# Determined's names.
Epoch = Epochs
Batch = Batches
Record = Records
Update = Updates
Token = Tokens

_UNITS: dict[str, type[TrainUnit]] = {
    "epochs": Epochs,
    "batches": Batches,
    "records": Records,
    "updates": Updates,
    "tokens": Tokens,
}


def parse_unit(value: TrainUnit | Mapping[str, int], name: str = "length") -> TrainUnit:
    """Return a unit from itself or from its form in a file, such as `{"epochs": 3}`.

    Args:
        value: A unit, or a mapping with one key.
        name: The name of the value, for the error message.

    Example:
        >>> parse_unit({"epochs": 3})
        Epochs(3)
    """
    if isinstance(value, TrainUnit):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ConfigError(f"{name}: expected a unit such as Epochs(3) or {{'epochs': 3}}, got {value!r}")
    ((unit, number),) = value.items()
    if unit not in _UNITS:
        raise UnknownNameError(f"unit of {name}", str(unit), _UNITS)
    return _UNITS[unit](number)


def unit_name(length: TrainUnit) -> str:
    """Return the name of a length's unit in a configuration file."""
    return type(length).__name__.lower()


def check_count(name: str, count: Any, least: int = 1) -> None:
    """Raise if a setting is not a whole number, or is smaller than `least`.

    Example:
        >>> check_count("patience", 2.5)
        Traceback (most recent call last):
        ...
        dovetail.errors.ConfigError: patience: expected a whole number that is at least 1, got 2.5
    """
    # Whole numbers of NumPy are no `int`, but have an index.
    if isinstance(count, bool) or not isinstance(count, SupportsIndex) or operator.index(count) < least:
        raise ConfigError(f"{name}: expected a whole number that is at least {least}, got {count!r}")


def check_finite(name: str, value: Any) -> None:
    """Raise if a setting is not a finite number.

    Example:
        >>> check_finite("threshold", float("nan"))
        Traceback (most recent call last):
        ...
        dovetail.errors.ConfigError: threshold: expected a finite number, got nan
    """
    if isinstance(value, bool) or not isinstance(value, SupportsFloat) or not math.isfinite(value):
        raise ConfigError(f"{name}: expected a finite number, got {value!r}")


def as_seconds(value: float | str | timedelta | Mapping[str, float], name: str = "time") -> float:
    """Return the seconds of a length of time.

    Args:
        value: Seconds, a `timedelta`, its arguments such as `{"hours": 2}`, or a text of the form `DD:HH:MM:SS` or
            `HH:MM:SS`.
        name: The name of the value, for the error message.

    Example:
        >>> as_seconds("00:12:00:00"), as_seconds("01:30:00"), as_seconds({"minutes": 5})
        (43200.0, 5400.0, 300.0)
    """
    seconds = math.nan
    if isinstance(value, Mapping):
        with suppress(TypeError):
            seconds = timedelta(**value).total_seconds()
    elif isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        parts = value.split(":")
        if len(parts) in (3, 4) and all(part.isascii() and part.isdigit() for part in parts):
            factors = (86400, 3600, 60, 1)[-len(parts) :]
            seconds = float(sum(factor * int(part) for factor, part in zip(factors, parts, strict=True)))
    elif isinstance(value, SupportsFloat) and not isinstance(value, bool):
        seconds = float(value)
    # NaN and values of another form fail here as well.
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{name}: expected a positive number of seconds, a timedelta, {{'hours': 2}}, or a text such as "
            f"'00:12:00:00' (days, hours, minutes, seconds), got {value!r}"
        )
    return seconds


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with a noun in the singular or the plural (by default with an s).

    Example:
        >>> counted(1, "batch", "batches"), counted(2, "epoch")
        ('1 batch', '2 epochs')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"
