"""Times of epochs and validations, the speed of training, and a limit of its time."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dovetail.callbacks.base import Callback, Report, is_new_run
from dovetail.callbacks.flops import StepFlops, peak_flops
from dovetail.errors import ConfigError
from dovetail.units import Progress, as_seconds

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class Timer(Callback):
    """Measure epochs, validations and the speed of training, without a hook in any step.

    An epoch lasts from its first batch to its end and includes its validations; the speeds exclude them. An epoch that
    was resumed in its middle is measured from there.

    With `flops`, the FLOPs of the first batch are counted, and the speed is also given in FLOP/s and as the model FLOPs
    utilisation (MFU), the share of the device's peak rate. The results of training do not change. Compiled steps cannot
    be counted, so give their number.

    Args:
        clock: A function that returns seconds.
        record: True to add the speed of every epoch to the history, as `speed_samples_per_second`,
            `speed_batches_per_second` and, if they are known, `speed_tokens_per_second`, `speed_flops_per_second` and
            `speed_mfu`. The histories of two equal runs then differ. `Tracker` logs these values.
        flops: True to count the FLOPs of a step, or the FLOPs of the forward and backward pass per sample.
        peak_flops: The most FLOP/s of the device of one process, which turns on `flops`; None means the peak rate in
            half precision from a table, for common GPUs.

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

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        record: bool = False,
        flops: bool | float = False,
        peak_flops: float | None = None,
    ) -> None:
        if not isinstance(flops, bool):
            _check_positive("flops", flops)
        if peak_flops is not None:
            _check_positive("peak_flops", peak_flops)
        self.record = record
        self.peak_flops = math.nan if peak_flops is None else float(peak_flops)
        self._reads_peak = peak_flops is None
        self._counts_flops = flops is True or (flops is False and peak_flops is not None)
        self._flops_per_sample = math.nan if isinstance(flops, bool) else float(flops)
        self._step_flops: StepFlops | None = None
        self._num_devices = 1
        self.epochs: list[float] = []
        self.validations: list[float] = []
        self._clock = clock
        self._trained = {"seconds": 0.0, "batches": 0, "records": 0, "tokens": 0}
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

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second, if batches have `input_ids` or steps return `num_tokens`; else 0."""
        return self._per_second("tokens")

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of a training step per sample; NaN if they are unknown."""
        return self._flops_per_sample

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of training, of all processes; NaN if the FLOPs of a step are unknown."""
        return self.samples_per_second * self._flops_per_sample

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the peak rate of all devices; NaN if one of the two is unknown."""
        return self.flops_per_second / (self.peak_flops * self._num_devices)

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
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second": self.flops_per_second,
            "mfu": self.mfu,
        }

    def on_train_start(self, context: TrainingContext) -> None:
        """Start measuring an epoch that is resumed in its middle, and look up the peak rate of the device."""
        self._num_devices = context.process.num_processes
        if self._reads_peak:
            self.peak_flops = peak_flops(context.device)
        if self._counts_flops and math.isnan(self._flops_per_sample) and _is_compiled(context):
            # A trace would be counted in place of the step.
            self._counts_flops = False
            warnings.warn(
                "Timer: the FLOPs of a compiled step cannot be counted; give flops=… per sample, as Timer(flops=True) "
                "counts them for the same trainer without compilation",
                UserWarning,
                stacklevel=2,
            )
        if context.progress.batch > 0:
            self.on_epoch_start(context)

    def on_epoch_start(self, context: TrainingContext) -> None:
        self._before, self._start, self._validating = context.progress.copy(), self._clock(), 0.0
        if self._counts_flops and math.isnan(self._flops_per_sample):
            # A separate callback, in the first epoch only: this one has no hook in a step.
            self._step_flops = StepFlops()
            context.callbacks.add(self._step_flops)

    def on_validation_start(self, context: TrainingContext) -> None:
        self._validation_start = self._clock()

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self.validations.append(self._clock() - self._validation_start)
        self._validating += self.validations[-1]

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        before, progress = dict(self._trained), context.progress
        self.epochs.append(self._count(context))
        self._read_flops(context)
        seconds = self._trained["seconds"] - before["seconds"]
        if self.record and seconds > 0:
            speeds = {
                f"{name}_per_second": (self._trained[key] - before[key]) / seconds
                for name, key in (("samples", "records"), ("batches", "batches"), ("tokens", "tokens"))
                if name != "tokens" or self._trained[key] > before[key]
            }
            speeds["flops_per_second"] = speeds["samples_per_second"] * self._flops_per_sample
            speeds["mfu"] = speeds["flops_per_second"] / (self.peak_flops * self._num_devices)
            speeds = {name: value for name, value in speeds.items() if not math.isnan(value)}
            position = {"epoch": progress.epoch, "batches": progress.batches, "updates": progress.updates}
            context.history.record("speed", speeds, **position)

    def on_train_end(self, context: TrainingContext) -> None:
        """Include an unfinished epoch in the speeds."""
        if context.progress.batch > 0:
            self._count(context)
        self._read_flops(context)

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        self._read_flops(context)

    def _read_flops(self, context: TrainingContext) -> None:
        """Read the FLOPs that were counted, and stop counting."""
        if self._step_flops is not None:
            self._step_flops.close()
            context.callbacks.remove(self._step_flops)
            self._flops_per_sample, self._step_flops = self._step_flops.per_sample, None

    def _count(self, context: TrainingContext) -> float:
        """Add the batches and seconds since the start of the epoch to the totals, and return the seconds."""
        # Reset, so that no epoch is counted twice.
        before, self._before = self._before, None
        if before is None:
            return math.nan
        seconds = self._clock() - self._start
        # Differences, because an epoch may have been resumed in its middle.
        self._trained["seconds"] += seconds - self._validating
        self._trained["batches"] += context.progress.batches - before.batches
        self._trained["records"] += context.progress.records - before.records
        self._trained["tokens"] += context.progress.tokens - before.tokens
        return seconds

    def _per_second(self, what: str) -> float:
        return self._trained[what] / self._trained["seconds"] if self._trained["seconds"] else math.nan

    def state_dict(self) -> dict[str, Any]:
        flops = {} if math.isnan(self._flops_per_sample) else {"flops_per_sample": self._flops_per_sample}
        return {
            "epochs": list(self.epochs),
            "validations": list(self.validations),
            "trained": dict(self._trained),
            **flops,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs, self.validations = list(state["epochs"]), list(state["validations"])
        self._trained = {"tokens": 0, **state["trained"]}
        if self._counts_flops and "flops_per_sample" in state:
            self._flops_per_sample = float(state["flops_per_sample"])


class MaxTime(Callback):
    """Stop training after a length of time, as the option `max_time` does.

    The time counts from the start of training, with validations and checkpoints. A checkpoint stores it, so that a
    resumed run continues to count. Training stops at the end of an update, at most one reporting period or one second
    later. If the run writes checkpoints, it then writes one.

    Args:
        limit: Seconds, a `timedelta`, its arguments such as `{"hours": 2}`, or a text of the form `DD:HH:MM:SS`.
        clock: A function that returns seconds.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> limit, context = MaxTime("00:00:01:00", clock=iter([0.0, 61.0, 61.0]).__next__), TrainingContext()
        >>> limit.on_train_start(context)
        >>> limit.on_epoch_end(context, {})
        >>> context.run.stop_reason
        'max_time: 61 s of training, the limit is 60 s'
    """

    def __init__(
        self, limit: float | str | timedelta | Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = as_seconds(limit, "MaxTime: limit")
        self._clock = clock
        self._seconds_before = 0.0
        self._start: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds of training so far, with the time before a resume."""
        return self._seconds_before + (0.0 if self._start is None else self._clock() - self._start)

    def on_train_start(self, context: TrainingContext) -> None:
        """Start the clock; a resumed run that has used its time already stops before its first batch."""
        if is_new_run(context):
            self._seconds_before = 0.0
        self._start = self._clock()
        if self._seconds_before >= self.limit:
            self._stop(context, self._seconds_before)

    def on_report(self, context: TrainingContext, report: Report) -> None:
        # Not in every step, where reading the clock would slow down tiny steps.
        self._check(context)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self._check(context)

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        self._pause()

    def on_train_end(self, context: TrainingContext) -> None:
        """Stop the clock; the next `fit` after the limit has its whole time again."""
        self._pause()
        if self._seconds_before >= self.limit:
            self._seconds_before = 0.0

    def _pause(self) -> None:
        self._seconds_before, self._start = self.seconds, None

    def _check(self, context: TrainingContext) -> None:
        seconds = self.seconds
        if seconds >= self.limit:
            self._stop(context, seconds)

    def _stop(self, context: TrainingContext, seconds: float) -> None:
        context.stop(f"max_time: {seconds:.4g} s of training, the limit is {self.limit:.4g} s")

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seconds_before, self._start = float(state["seconds"]), None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _is_compiled(context: TrainingContext) -> bool:
    trainer = context.run.trainer
    # By its kind, because callbacks do not import layers.
    return trainer is not None and any(
        vars(it).get("kind") == "compilation" for it in trainer._customized_by("train_step")
    )


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"Timer: expected a positive number as {name}, got {value!r}")
