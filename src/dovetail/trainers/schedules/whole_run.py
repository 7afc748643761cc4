"""Schedules over the length of a run: warm-up, then cosine, linear, WSD, inverse square root or constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.schedules.applied import set_lr
from dovetail.units import Batches, Epochs, Records, Tokens, TrainUnit, Updates

if TYPE_CHECKING:
    from dovetail.trainers.single_process import SingleProcessTrainer

# The timescale of the inverse square root without warm-up, as in transformers.
_TIMESCALE = 10_000


@dataclass(frozen=True)
class RunSchedule:
    """A factor for the learning rate that depends on the length of the run, so no number of steps is computed by hand.

    The learning rate of each parameter group is the peak. `Trainer(lr_scheduler="cosine", warmup=0.05)` builds this
    schedule. The names of shapes and their values after `n` of `N` updates, with `W` updates of warm-up (`n / W`
    during the warm-up) and `t = (n - W) / (N - W)`:

    - `cosine`: (1 + cos(π·t)) / 2
    - `linear`: 1 - t
    - `wsd` (warm-up, stable, decay): 1, and in the last `decay` of the run a straight line to 0
    - `inverse_sqrt`: 1 / sqrt((n + s - W) / s) with s = W, or 10,000 without warm-up
    - `constant`: 1

    Cosine, linear and WSD end at `final` instead of 0. If a run is continued with a longer `max_length`, the schedule
    uses the new length.

    Args:
        shape: The shape after the warm-up.
        warmup: The length of the warm-up: a part of the run (0.05), a number of updates (100 or `Updates(100)`), or a
            number of epochs (`Epochs(1)`).
        decay: The length of WSD's decay, in the same units.
        final: The factor at the end of cosine, linear and WSD.

    Example:
        >>> schedule = RunSchedule("linear", warmup=0.2, final=0.1)
        >>> [round(schedule.factor(n, 10, 5), 3) for n in (0, 1, 2, 6, 10)]
        [0.0, 0.5, 1.0, 0.55, 0.1]
    """

    shape: str = "cosine"
    warmup: float | TrainUnit = 0
    decay: float | TrainUnit = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UnknownNameError("shape", self.shape, SHAPES)
        _check_part("warmup", self.warmup)
        _check_part("decay", self.decay)
        if isinstance(self.final, bool) or not isinstance(self.final, (int, float)) or not 0 <= self.final <= 1:
            raise ConfigError(f"final: expected a number from 0 to 1, got {self.final!r}")

    @property
    def needs_length(self) -> bool:
        """True if the factors depend on the number of updates of the run."""
        return self.shape in ("cosine", "linear", "wsd") or isinstance(self.warmup, (float, Epochs))

    def factor(self, count: float, num_updates: int, updates_per_epoch: int) -> float:
        """Return the factor after `count` updates of a run of `num_updates`, of which an epoch has `updates_per_epoch`.

        Both lengths may be 0 if `needs_length` is False.
        """
        warmup = _in_updates(self.warmup, num_updates, updates_per_epoch)
        if count < warmup:
            return count / warmup
        shape = SHAPES[self.shape]
        decay = _in_updates(self.decay, num_updates, updates_per_epoch)
        return shape(count - warmup, max(num_updates - warmup, 0), warmup, decay, self.final)

    def __call__(self, optimizer: Optimizer) -> RunScheduleLR:
        """Return a torch scheduler that multiplies the learning rates of `optimizer`, from its first update on."""
        return RunScheduleLR(optimizer, self)


class RunScheduleLR(LRScheduler):
    """The torch scheduler of a `RunSchedule`. The trainer sets the length of each run with `set_length`.

    Args:
        optimizer: The optimizer whose learning rates are the peak values.
        schedule: The schedule.
    """

    def __init__(self, optimizer: Optimizer, schedule: RunSchedule) -> None:
        self.schedule = schedule
        self._length: tuple[int, int] | None = None
        self._offset = 0
        super().__init__(optimizer)

    def set_length(self, num_updates: int, updates_per_epoch: int, *, before: int = 0) -> None:
        """Set the length of the run, and apply the factor of the current position.

        Args:
            num_updates: The updates of the whole run, counted from the start of training.
            updates_per_epoch: The updates of an epoch, 0 if unknown.
            before: Updates of earlier runs that this run continues, if the configuration has `global_lr_scheduler`.
        """
        self._length, self._offset = (num_updates, updates_per_epoch), before
        self._apply()

    def get_lr(self) -> list[float | Tensor]:
        """Return the current learning rate of every parameter group."""
        count = self.last_epoch + self._offset
        if self._length is not None:
            factor = self.schedule.factor(count, *self._length)
        elif count == 0:
            # Before the first run. The factor of the first update needs no length.
            factor = 0.0 if self.schedule.warmup else 1.0
        else:
            raise ConfigError(
                f"lr_scheduler: {self.schedule!r} needs the length of the run, which only a trainer sets that has the "
                "schedule as its own lr_scheduler, not inside another scheduler"
            )
        return [rate * factor for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next update."""
        # This replaces torch's own `step`, which warns if no update has come before.
        self._step_count += 1
        self.last_epoch += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the peak rates and the length of the run, as plain numbers."""
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "base_lrs": [float(rate) for rate in self.base_lrs],
            "length": None if self._length is None else [*self._length, self._offset],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; the length of the current run, if there is one, is kept."""
        self.base_lrs = list(state_dict["base_lrs"])
        if self._length is None and state_dict["length"] is not None:
            num_updates, updates_per_epoch, self._offset = state_dict["length"]
            self._length = num_updates, updates_per_epoch
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_lr(group, float(rate))


def set_run_lengths(trainer: SingleProcessTrainer) -> None:
    """Give every `RunScheduleLR` of a trainer the length of the run that its plan describes.

    Raises:
        ConfigError: A schedule needs the number of updates, and the plan or the data does not define it.
    """
    context = trainer.context
    schedulers = [it.scheduler for it in context.schedulers if isinstance(it.scheduler, RunScheduleLR)]
    plan = context.run.plan
    if not schedulers or plan is None or context.run.data.get("train") is None:
        return
    num_batches, window = trainer.num_batches("train"), context.run.window.size
    # A window never spans two epochs.
    per_epoch = 0 if num_batches is None else math.ceil(num_batches / window)
    num_updates = _count_updates(plan.max_length, num_batches, window, trainer)
    config, before = context.config, 0
    if config.get("global_lr_scheduler") and "epochs_before" in config and num_updates is not None:
        before, num_updates = config["epochs_before"] * per_epoch, config["total_epochs"] * per_epoch
    for scheduler in schedulers:
        schedule = scheduler.schedule
        needs_epochs = any(isinstance(it, Epochs) for it in (schedule.warmup, schedule.decay))
        if (schedule.needs_length and num_updates is None) or (needs_epochs and num_batches is None):
            counts_tokens = isinstance(plan.max_length, Tokens)
            reason = "a batch has any number of tokens" if counts_tokens else "the data has no length"
            advice = "" if counts_tokens else ", or a loader with a length"
            raise ConfigError(
                f"lr_scheduler: {schedule.shape!r} needs the number of updates, but {reason} and max_length is "
                f"{plan.max_length}; give max_length=Updates(n){advice}"
            )
        scheduler.set_length(num_updates or 0, per_epoch, before=before)


def _check_part(name: str, value: float | TrainUnit) -> None:
    """Raise unless `value` is a part of a run below 1, a whole number of updates, or a number of updates or epochs."""
    if isinstance(value, TrainUnit):
        if not isinstance(value, (Updates, Epochs)) or not isinstance(value.value, int):
            raise ConfigError(f"{name}: expected Updates(n) or Epochs(n), got {value!r}")
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= 0 or (isinstance(value, float) and value >= 1):
        raise ConfigError(
            f"{name}: expected a part of the run below 1.0, a whole number of updates, or a unit such as Epochs(1), "
            f"got {value!r}"
        )


def _in_updates(value: float | TrainUnit, num_updates: int, updates_per_epoch: int) -> int:
    if isinstance(value, Epochs):
        return value.length * updates_per_epoch
    if isinstance(value, TrainUnit):
        return value.length
    return math.ceil(value * num_updates) if isinstance(value, float) else value


def _count_updates(
    length: TrainUnit, num_batches: int | None, window: int, trainer: SingleProcessTrainer
) -> int | None:
    """Return the updates of a run of the given length, or None if they cannot be known in advance."""
    if isinstance(length, Updates):
        return length.length
    if isinstance(length, Tokens):
        return None
    if num_batches is None:
        # Without a length, the batches at which epochs end are unknown, so the shorter last windows are not counted.
        return math.ceil(length.length / window) if isinstance(length, Batches) else None
    per_epoch = math.ceil(num_batches / window)
    if isinstance(length, Epochs):
        return length.length * per_epoch
    batches = length.length
    if isinstance(length, Records):
        size = getattr(trainer._loader("train"), "batch_size", None)
        if not isinstance(size, int):
            return None
        batches = math.ceil(batches / (size * trainer.context.process.share.num_replicas))
    epochs, rest = divmod(batches, max(num_batches, 1))
    return epochs * per_epoch + math.ceil(rest / window)


def _cosine(count: float, length: int, warmup: int, decay: int, final: float) -> float:
    part = min(count / max(length, 1), 1.0)
    return final + (1 - final) * 0.5 * (1.0 + math.cos(math.pi * part))


def _linear(count: float, length: int, warmup: int, decay: int, final: float) -> float:
    return final + (1 - final) * max(0.0, (length - count) / max(length, 1))


def _wsd(count: float, length: int, warmup: int, decay: int, final: float) -> float:
    return final + (1 - final) * min(1.0, max(0.0, (length - count) / max(decay, 1)))


def _inverse_sqrt(count: float, length: int, warmup: int, decay: int, final: float) -> float:
    timescale = warmup or _TIMESCALE
    return 1.0 / math.sqrt((count + timescale) / timescale)


def _constant(count: float, length: int, warmup: int, decay: int, final: float) -> float:
    return 1.0


SHAPES: Mapping[str, Callable[[float, int, int, int, float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
}
"""The shapes by name: the factor from updates after the warm-up, their total number, warm-up, decay and final."""
