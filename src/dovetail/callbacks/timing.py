"""Times of epochs and validations, and the speed of training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dovetail.callbacks.base import Callback
from dovetail.units import Progress

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class Timer(Callback):
    """Measure epochs, validations and the speed of training, without a hook in any step.

    An epoch lasts from its first batch to its end and includes its validations; the speeds exclude them. An epoch that
    was resumed in its middle is measured from there.

    Args:
        clock: A function that returns seconds.

    Attributes:
        epochs: The seconds of every epoch.
        validations: The seconds of every validation.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> timer, context = Timer(clock=iter([0.0, 2.0]).__next__), TrainingContext()
        >>> timer.on_epoch_start(context)
        >>> context.progress.batches, context.progress.records = 10, 320
        >>> timer.on_epoch_end(context, {})
        >>> timer.batches_per_second, timer.samples_per_second
        (5.0, 160.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.epochs: list[float] = []
        self.validations: list[float] = []
        self._clock = clock
        self._trained = {"seconds": 0.0, "batches": 0, "records": 0}
        self._before: Progress | None = None
        self._start = self._validation_start = self._validating = 0.0

    @property
    def batches_per_second(self) -> float:
        """Training batches per second; NaN before the first."""
        return self._per_second("batches")

    @property
    def samples_per_second(self) -> float:
        """Training samples per second; NaN before the first."""
        return self._per_second("records")

    def summary(self) -> dict[str, float]:
        """Return the mean and total times and the speeds, by name; NaN if nothing was measured."""
        return {
            "epochs": len(self.epochs),
            "epoch_seconds": _mean(self.epochs),
            "validations": len(self.validations),
            "validation_seconds": _mean(self.validations),
            "training_seconds": self._trained["seconds"],
            "batches_per_second": self.batches_per_second,
            "samples_per_second": self.samples_per_second,
        }

    def on_train_start(self, context: TrainingContext) -> None:
        """Start measuring an epoch that is resumed in its middle."""
        if context.progress.batch > 0:
            self.on_epoch_start(context)

    def on_epoch_start(self, context: TrainingContext) -> None:
        self._before, self._start, self._validating = context.progress.copy(), self._clock(), 0.0

    def on_validation_start(self, context: TrainingContext) -> None:
        self._validation_start = self._clock()

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self.validations.append(self._clock() - self._validation_start)
        self._validating += self.validations[-1]

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self.epochs.append(self._count(context))

    def on_train_end(self, context: TrainingContext) -> None:
        """Include an unfinished epoch in the speeds."""
        if context.progress.batch > 0:
            self._count(context)

    def _count(self, context: TrainingContext) -> float:
        before, self._before = self._before, None
        if before is None:
            return math.nan
        seconds = self._clock() - self._start
        self._trained["seconds"] += seconds - self._validating
        self._trained["batches"] += context.progress.batches - before.batches
        self._trained["records"] += context.progress.records - before.records
        return seconds

    def _per_second(self, what: str) -> float:
        return self._trained[what] / self._trained["seconds"] if self._trained["seconds"] else math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": list(self.epochs), "validations": list(self.validations), "trained": dict(self._trained)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs, self.validations = list(state["epochs"]), list(state["validations"])
        self._trained = dict(state["trained"])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
