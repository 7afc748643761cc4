"""Base class of loggers, and the values that they log."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scalar: TypeAlias = "str | int | float | bool | None"
"""A hyperparameter."""

Value: TypeAlias = "float | Histogram | Figure"
"""A value that can be logged: a number, a distribution, or a matplotlib figure."""

Status: TypeAlias = Literal["finished", "failed"]
"""How a run ended."""


@dataclass(frozen=True)
class Run:
    """The run that a logger writes.

    Attributes:
        id: Unique name of the run; a resumed run has the same id.
        step: The number of batches that the run has trained: 0 if it is new. Later values are dropped, because the
            process that logged them has ended.
        hyperparameters: Flat names and plain values; secrets are already masked.

    Example:
        >>> Run("3f2a9c").is_resumed, Run("3f2a9c", step=100).is_resumed
        (False, True)
    """

    id: str
    step: int = 0
    hyperparameters: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # It is used in paths and queries, and comes from a checkpoint.
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.id):
            raise ConfigError(f"run id: expected letters, digits, '-' and '_', 64 at most, got {self.id!r}")

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues an earlier one."""
        return self.step > 0


class Logger(ABC):
    """Base class of loggers. `Tracker` calls it; an error in a method only disables the logger.

    A logger opens and imports nothing before `start`, so that it can be sent to another process, and holds nothing open
    after `finish`.

    Example:
        >>> class Print(Logger):
        ...     def start(self, run):
        ...         print("start", dict(run.hyperparameters))
        ...     def log(self, values, step):
        ...         print(step, dict(values))
        ...     def finish(self, status):
        ...         print(status)
        >>> logger = Print()
        >>> logger.start(Run("1", hyperparameters={"lr": 0.1}))
        start {'lr': 0.1}
        >>> logger.log({"train_loss": 0.5}, step=10)
        10 {'train_loss': 0.5}
        >>> logger.finish("finished")
        finished
    """

    @abstractmethod
    def start(self, run: Run) -> None:
        """Open a run when training starts: a new one, or the same run if it is resumed."""

    @abstractmethod
    def log(self, values: Mapping[str, Value], step: int) -> None:
        """Write values of a step, the number of batches trained so far. Steps never decrease."""

    @abstractmethod
    def finish(self, status: Status) -> None:
        """Write pending values and close the run."""


class Histogram:
    """The distribution of numbers: counts in bins of equal width.

    NaN and infinities are not in any bin; `num_not_finite` counts them.

    Args:
        values: A tensor or an array of any shape, on any device.
        bins: The number of bins.

    Attributes:
        counts: The number of values in each bin.
        edges: The limits of the bins; one more than there are bins.

    Example:
        >>> histogram = Histogram([0.0, 1.0, 1.0, 4.0], bins=2)
        >>> histogram.counts.tolist(), histogram.edges.tolist()
        ([3, 1], [0.0, 2.0, 4.0])
    """

    __slots__ = ("counts", "edges", "num_not_finite", "sum", "sum_squares")

    def __init__(self, values: Any, bins: int = 64) -> None:
        if isinstance(values, Tensor):
            # Numpy has no bfloat16; types wider than float32 are unchanged.
            values = values.detach().cpu()
            values = (values if values.dtype.itemsize >= 4 else values.float()).numpy()
        numbers = np.asarray(values, dtype=np.float64).ravel()
        finite = numbers[np.isfinite(numbers)]
        self.num_not_finite = len(numbers) - len(finite)
        self.counts, self.edges = np.histogram(finite, bins)
        self.sum, self.sum_squares = float(finite.sum()), float(np.square(finite).sum())

    def as_dict(self) -> dict[str, list[float]]:
        """Return counts and edges as lists."""
        return {"counts": self.counts.tolist(), "edges": self.edges.tolist()}


@dataclass(frozen=True)
class Sorted:
    """Values by their kind."""

    numbers: dict[str, float]
    histograms: dict[str, Histogram]
    figures: dict[str, Figure]


def sort(values: Mapping[str, Value]) -> Sorted:
    """Sort values into numbers, histograms and figures.

    Raises:
        ConfigError: A value has another type, or the name of a figure cannot be a file name.
    """
    found = Sorted({}, {}, {})
    for name, value in values.items():
        if isinstance(value, Histogram):
            found.histograms[name] = value
        elif isinstance(value, (int, float, np.number)) or (isinstance(value, Tensor) and value.numel() == 1):
            found.numbers[name] = float(value)
        # By the name of the module, because matplotlib is optional.
        elif any(kind.__module__ == "matplotlib.figure" for kind in type(value).__mro__):
            found.figures[check_name(name)] = value
        else:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ConfigError(f"log: {name!r}: expected a number, a Histogram or a figure of matplotlib, got {shown}")
    return found


def check_name(name: str) -> str:
    """Return a name that is used as a path; raise if it would leave its folder."""
    parts = name.split("/")
    # Backslashes and colons are parts of paths on Windows.
    if any(part in ("", ".", "..") or not re.fullmatch(r"[^\\:\x00-\x1f]+", part) for part in parts):
        raise ConfigError(f"figure: expected a name such as 'confusion' or 'valid/confusion', got {name!r}")
    return name
