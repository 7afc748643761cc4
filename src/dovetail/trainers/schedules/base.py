"""Base classes of schedules: options, recorded values, and conversion to a torch scheduler."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from torch.optim import Optimizer

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.trainers.schedules.applied import ScheduleLR
from dovetail.units import check_count

# Options of all schedules that are lengths: a value of 0 would be a division by zero.
_LENGTHS = frozenset(
    {"stepsize", "lr_decay_every", "num_iters", "num_iter", "step_per_epoch", "num_epochs", "decay_length"}
)


@dataclass(kw_only=True)
class Schedule(ABC):
    """A value that changes during training. A subclass defines it in `at`.

    Example:
        >>> class HalfLife(Schedule):
        ...     def at(self, count):
        ...         return 0.5 ** (count / self.stepsize)
        >>> HalfLife(stepsize=10).get_lr(20)
        0.25

    Args:
        stepsize: Half the length of a cycle, for a schedule that has cycles.
        start_iter: The count at which the schedule starts; until then its first value holds.
        lr_history_size: The number of values to record in `lr_history`, 0 for all; None records none.
        no_lr_history: True to record none; it overrides the size.

    Attributes:
        unit: The unit of the argument of `get_lr`.
        key: The setting of the optimizer that gets the value.
        needs_accuracy: True if the schedule must `observe` every validation accuracy.
        lr_history: The recorded values: one for each update (or epoch) of training, and one for each call of `get_lr`.
            None if nothing is recorded. Checkpoints do not contain them.
    """

    unit: ClassVar[Literal["update", "epoch", "accuracy"]] = "update"
    key: ClassVar[Literal["lr", "momentum"]] = "lr"
    needs_accuracy: ClassVar[bool] = False

    stepsize: float = 1000
    start_iter: float = 0
    lr_history_size: int | None = field(default=None, repr=False, compare=False)
    no_lr_history: bool = field(default=False, repr=False, compare=False)
    # Copies share this list: the schedule that the user holds shows the values that the trainer's copy recorded.
    lr_history: list[float] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.lr_history_size is not None:
            check_count(f"{type(self).__name__}: lr_history_size", self.lr_history_size, 0)
            self.lr_history = None if self.no_lr_history else []
        for name in _LENGTHS.intersection(option.name for option in fields(self)):
            # `not … > 0` also rejects NaN.
            if not (length := getattr(self, name)) > 0:
                raise ConfigError(f"{type(self).__name__}: {name}: expected a number above 0, got {length!r}")

    @abstractmethod
    def at(self, count: float) -> float:
        """Return the value `count` updates (or epochs) after `start_iter`, without any change of state."""

    def value(self, count: float) -> float:
        """Return the value after `count` updates (or epochs) of training, without any change of state."""
        return self.at(max(0, count - self.start_iter))

    def get_lr(self, x: float) -> float:
        """Return the value at `x`, which counts in `unit`, and record it."""
        value = self.value(x)
        self.record(value)
        return value

    def record(self, value: float) -> None:
        """Append a value to `lr_history`, if there is one and it is not full."""
        history = self.lr_history
        if history is not None and (not self.lr_history_size or len(history) < self.lr_history_size):
            history.append(value)

    def observe(self, accuracy: float) -> None:
        """Process a validation accuracy.

        Raises:
            ConfigError: The schedule does not depend on accuracy.
        """
        raise ConfigError(f"{type(self).__name__} does not depend on accuracy, but was given {accuracy}")

    def state_dict(self) -> dict[str, float]:
        """Return the observed values."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state returned by `state_dict`."""
        if state:
            raise ConfigError(f"{type(self).__name__} has no state, but was given the state {dict(state)}")

    def bind(self, optimizer: Optimizer) -> ScheduleLR:
        """Return a torch scheduler that applies this schedule to `optimizer`, from its first update on."""
        return ScheduleLR(optimizer, self)

    def plot(self, path: str | os.PathLike[str], num: int) -> None:
        """Plot the first `num` updates (or epochs) to an image file.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        if self.unit == "accuracy":
            raise ConfigError(f"{type(self).__name__} cannot be drawn: accuracies are not known before training")
        figure = require("matplotlib.figure", "plot").Figure(figsize=(6, 3.4), dpi=144, layout="constrained")
        axes = figure.subplots()
        check_count("num", num)
        # At most about 2,000 points.
        counts = range(0, num + 1, math.ceil(num / 2000))
        axes.plot(counts, [self.value(count) for count in counts], color="#0072B2", linewidth=1.7)
        axes.set_title(type(self).__name__, loc="left", fontweight="bold")
        axes.set(xlabel=self.unit, ylabel=self.key)
        axes.grid(color="#E3E3E3", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


@dataclass(kw_only=True)
class LRSchedule(Schedule):
    """A learning rate between `lr_min` and `lr_max`: the ends of a cycle, or floor and start of a decay."""

    lr_min: float = 1e-4
    lr_max: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lr_min <= self.lr_max:
            raise ConfigError(
                f"{type(self).__name__}: expected 0 <= lr_min <= lr_max, got {self.lr_min} and {self.lr_max}"
            )

    def _between(self, height: float) -> float:
        return self.lr_min + (self.lr_max - self.lr_min) * height
