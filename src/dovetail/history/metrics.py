"""Metrics by name, whether small or large values are good, and the average loss of an epoch."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Literal, TypeAlias

from dovetail.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from torch import Tensor

Mode: TypeAlias = Literal["min", "max"]
"""Whether small or large values of a metric are good."""

_SMALL_IS_GOOD = frozenset({"loss", "error", "err", "mse", "rmse", "mae", "mape", "perplexity", "ppl", "nll", "fid"})
_LARGE_IS_GOOD = frozenset(
    {"accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "score", "bleu", "rouge", "iou", "dice", "psnr"}
)


def mode_of(monitor: str) -> Mode:
    """Return whether small (`min`) or large (`max`) values of a metric are good, judged by the words in its name.

    Raises:
        ConfigError: The name has a word for neither or for both.

    Example:
        >>> mode_of("valid_loss"), mode_of("valid_accuracy")
        ('min', 'max')
    """
    mode = mode_or_none(monitor)
    if mode is None:
        raise ConfigError(
            f"monitor {monitor!r}: give mode='min' or mode='max', its name does not show which values are good"
        )
    return mode


def mode_or_none(metric: str) -> Mode | None:
    """Return which values of a metric are good; None if its name has a word for neither or for both."""
    # The 1 belongs to `f1`.
    words = set(re.findall(r"[a-z]+1?", metric.lower()))
    falls, rises = bool(words & _SMALL_IS_GOOD), bool(words & _LARGE_IS_GOOD)
    return None if falls == rises else "min" if falls else "max"


class RunHistory:
    """Named metrics with all their values.

    Example:
        >>> history = RunHistory()
        >>> history.update_metric("train_loss", 0.5)
        >>> history.update_metric("train_loss", 0.25)
        >>> history.get_metric_values("train_loss"), history.get_latest_metric("train_loss")
        ([0.5, 0.25], 0.25)
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def get_metric_names(self) -> set[str]:
        """Return the names of all metrics that have a value."""
        return set(self._values)

    def get_metric_values(self, name: str) -> list[float]:
        """Return every value of a metric, oldest first; an empty list for an unknown metric."""
        return list(self._values.get(name, ()))

    def get_latest_metric(self, name: str) -> float:
        """Return the newest value of a metric.

        Raises:
            ValueError: The metric has no value; the message has the nearest known name.
        """
        values = self.get_metric_values(name)
        if not values:
            raise self._unknown(name)
        return values[-1]

    def update_metric(self, name: str, value: Tensor | float) -> None:
        """Add a value, a number or a tensor with one element, to a metric."""
        self._values.setdefault(name, []).append(as_number(name, value))

    def reset(self) -> None:
        """Remove all values."""
        self._values.clear()

    def _unknown(self, name: str) -> ConfigError:
        if not (known := self.get_metric_names()):
            return ConfigError(f"metric {name!r} has no value: nothing has been recorded yet")
        return UnknownNameError("metric", name, known)


class LossTracker:
    """The average loss of an epoch, weighted by samples.

    Losses may be tensors with a graph, on any device: the tracker stores sums without the graph, and does not wait for
    the device until a number is read.

    Example:
        >>> tracker = LossTracker()
        >>> tracker.update(1.0, batch_size=3)
        >>> tracker.update(2.0, batch_size=1)
        >>> tracker.average, tracker.loss_value
        (1.25, 2.0)
    """

    def __init__(self) -> None:
        self.running_count = 0
        self._total: Tensor | float = 0.0
        self._last: Tensor | float = math.nan

    def update(self, loss: Tensor | float, batch_size: int = 1) -> None:
        """Add the mean loss of one batch of `batch_size` samples."""
        self.running_count += batch_size
        if isinstance(loss, (int, float)):
            self._last = float(loss)
            self._total = self._total + loss * batch_size
            return
        # A clone, because a captured graph writes the next loss into the same memory.
        self._last = last = loss.detach().clone()
        if isinstance(self._total, float):
            # Imported here, because importing this module must not import torch.
            from dovetail.accelerators import widest_float

            # A sum in bfloat16 stops growing after a few hundred batches.
            self._total = last.to(widest_float(last.device.type)) * batch_size + self._total
        else:
            self._total = self._total.add(last, alpha=batch_size)

    def reset(self) -> None:
        """Start a new epoch."""
        self.running_count, self._total, self._last = 0, 0.0, math.nan

    @property
    def average(self) -> float:
        """The mean loss of all samples; NaN if there are none."""
        return self.total_loss / self.running_count if self.running_count else math.nan

    @property
    def total_loss(self) -> float:
        """The sum of the losses of all samples."""
        return float(self._total)

    @property
    def loss_value(self) -> float:
        """The loss of the last batch; NaN if there is none."""
        return float(self._last)


def as_number(name: str, value: Tensor | float) -> float:
    """Return the value of a metric as a float.

    Raises:
        ConfigError: It is neither a number nor a tensor with one element.
    """
    if isinstance(value, (int, float)):
        return float(value)
    try:
        # Not float(tensor): it warns about a tensor that still has its graph.
        return float(value.item())
    except AttributeError:
        raise ConfigError(f"metric {name!r}: expected a number or a tensor with one, got {value!r}") from None
