"""Schedules of the learning rate and of momentum, as functions of the update or epoch number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.errors import ConfigError
from dovetail.trainers.schedules.base import LRSchedule, Schedule


@dataclass(kw_only=True)
class StepScheduler(LRSchedule):
    """`lr_max`, multiplied by `lr_decay` every `lr_decay_every` updates, not below `lr_min`.

    Example:
        >>> schedule = StepScheduler(lr_decay=0.5, lr_decay_every=10)
        >>> schedule.get_lr(9), schedule.get_lr(10), schedule.get_lr(20)
        (1.0, 0.5, 0.25)
    """

    lr_decay: float = 0.001
    lr_decay_every: int = 10_000

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return max(self.lr_min, self.lr_max * math.pow(self.lr_decay, count // self.lr_decay_every))


@dataclass(kw_only=True)
class LinearDecay(LRSchedule):
    """A straight line from `lr_max` to `lr_min` in `num_iters` updates.

    Example:
        >>> LinearDecay(lr_min=0.0, lr_max=1.0, num_iters=4).get_lr(1)
        0.75
    """

    num_iters: int = 100_000

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return self._between(1 - min(1.0, count / self.num_iters))


@dataclass(kw_only=True)
class LogDecay(LRSchedule):
    """Decreases from `lr_max` to `lr_min` in `num_iter` updates by a constant factor.

    Example:
        >>> round(LogDecay(lr_min=0.01, lr_max=1.0, num_iter=10).get_lr(5), 12)
        0.1
    """

    num_iter: int = 50_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_min == 0:
            raise ConfigError(
                f"LogDecay: lr_min: expected a number above 0, got {self.lr_min!r}: repeated division never reaches 0"
            )

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return self.lr_max * math.pow(self.lr_min / self.lr_max, min(1.0, count / self.num_iter))


@dataclass(kw_only=True)
class ExponentialDecay(LRSchedule):
    """`lr_max · e^(−k·count)`, not below `lr_min`.

    Example:
        >>> round(ExponentialDecay(k=0.1).get_lr(10), 4)
        0.3679
    """

    k: float = 0.001

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return max(self.lr_min, self.lr_max * math.exp(-self.k * count))


@dataclass(kw_only=True)
class WarmRestart(LRSchedule):
    """Half a cosine from `lr_max` to `lr_min` in `2 · stepsize` updates, then a restart at `lr_max`.

    Example:
        >>> schedule = WarmRestart(lr_min=0.0, lr_max=1.0, stepsize=10)
        >>> schedule.get_lr(0), round(schedule.get_lr(10), 12), schedule.get_lr(20)
        (1.0, 0.5, 1.0)

    Args:
        step_per_epoch: The updates of an epoch; with it, `stepsize` counts epochs.
    """

    step_per_epoch: int = 1

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        period = 2 * self.stepsize * self.step_per_epoch
        return self._between((1 + math.cos(math.pi * (count % period) / period)) / 2)


@dataclass(kw_only=True)
class Triangular(LRSchedule):
    """Increases from `lr_min` to `lr_max` in `stepsize` updates, decreases again, and repeats (Smith, 2017).

    Example:
        >>> schedule = Triangular(lr_min=0.1, lr_max=1.0, stepsize=10)
        >>> [round(schedule.get_lr(count), 12) for count in (0, 5, 10, 15, 20)]
        [0.1, 0.55, 1.0, 0.55, 0.1]
    """

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return self._between(_triangle(count, self.stepsize))


@dataclass(kw_only=True)
class InvTriangular(LRSchedule):
    """Decreases from `lr_max` to `lr_min` in `stepsize` updates, increases again, and repeats.

    Example:
        >>> InvTriangular(lr_min=0.0, lr_max=1.0, stepsize=10).get_lr(2)
        0.8
    """

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return self._between(1 - _triangle(count, self.stepsize))


@dataclass(kw_only=True)
class TriangularExp(LRSchedule):
    """`Triangular`, multiplied by `e^(−k·count)`.

    Example:
        >>> round(TriangularExp(stepsize=10, k=0.1).get_lr(10), 4)
        0.3679
    """

    k: float = 1e-4

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return self._between(_triangle(count, self.stepsize)) * math.exp(-self.k * count)


@dataclass(kw_only=True)
class Triangular2(LRSchedule):
    """`Triangular`, with half the height in every new cycle.

    Example:
        >>> schedule = Triangular2(lr_min=0.0, lr_max=1.0, stepsize=10)
        >>> schedule.get_lr(10), schedule.get_lr(30), schedule.get_lr(50)
        (1.0, 0.5, 0.25)
    """

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return self._between(_halving_triangle(count, self.stepsize))


@dataclass(kw_only=True)
class Triangular2Exp(LRSchedule):
    """`Triangular2`, multiplied by `e^(−k·count)`.

    Example:
        >>> round(Triangular2Exp(lr_min=0.0, stepsize=10, k=0.1).get_lr(30), 6)
        0.024894
    """

    k: float = 1e-4

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start."""
        return self._between(_halving_triangle(count, self.stepsize)) * math.exp(-self.k * count)


@dataclass(kw_only=True)
class EpochSet(LRSchedule):
    """Values at given epochs.

    Example:
        >>> [EpochSet({0: 0.1, 5: 0.01}, lr_value=True).get_lr(epoch) for epoch in (0, 4, 5)]
        [0.1, 0.1, 0.01]
        >>> [EpochSet({0: 1.0, 5: 0.5, 8: 0.5}).get_lr(epoch) for epoch in (4, 5, 8)]
        [1.0, 0.5, 0.25]

    Args:
        schedule: Maps epochs to values; epoch 0 has the initial learning rate.
        lr_value: True if later values are learning rates; otherwise they are factors of the learning rate.
    """

    unit = "epoch"

    schedule: Mapping[int, float] = field(kw_only=False)
    lr_value: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.schedule, Mapping):
            raise ConfigError(
                f"EpochSet: expected a mapping of epochs to values, {{0: 0.1, 5: 0.01}}, got {self.schedule!r}"
            )
        # Not `isinstance`: True and False are no epochs.
        if 0 not in self.schedule or not all(type(epoch) is int for epoch in self.schedule):
            raise ConfigError(f"EpochSet: expected epochs, with 0 among them, as keys, got {dict(self.schedule)}")

    def at(self, count: float) -> float:
        """Return the value `count` epochs after the start."""
        # Factors of all epochs so far are multiplied; of learning rates the last one counts.
        reached = [self.schedule[epoch] for epoch in sorted(self.schedule) if epoch <= count]
        return reached[-1] if self.lr_value else math.prod(reached)


@dataclass(kw_only=True)
class DecayWhenEpoch(LRSchedule):
    """`lr_max`, multiplied by `lr_decay` every `num_epochs` epochs, not below `lr_min`.

    Example:
        >>> DecayWhenEpoch(num_epochs=2, lr_decay=0.5).get_lr(4)
        0.25
    """

    unit = "epoch"

    num_epochs: int = 8
    lr_decay: float = 0.9

    def at(self, count: float) -> float:
        """Return the value `count` epochs after the start."""
        return max(self.lr_min, self.lr_max * math.pow(self.lr_decay, count // self.num_epochs))


@dataclass(kw_only=True)
class DecayToEpoch(LRSchedule):
    """`initial_lr` for `non_decay_time` epochs, then a straight line to `final_lr` in `decay_length` epochs.

    Example:
        >>> schedule = DecayToEpoch(initial_lr=1.0, final_lr=0.0, non_decay_time=2, decay_length=4)
        >>> [schedule.get_lr(epoch) for epoch in (0, 2, 3, 6, 7)]
        [1.0, 1.0, 0.75, 0.0, 0.0]
    """

    unit = "epoch"

    non_decay_time: float = 0
    initial_lr: float = 3e-4
    final_lr: float = 0.0
    decay_length: float = 40

    def at(self, count: float) -> float:
        """Return the value `count` epochs after the start."""
        done = min(1.0, max(0.0, (count - self.non_decay_time) / self.decay_length))
        return self.final_lr + (self.initial_lr - self.final_lr) * (1 - done)


@dataclass(kw_only=True)
class _DecayWithAccuracy(LRSchedule):
    """A learning rate that is multiplied by `lr_decay` whenever accuracy falls.

    Args:
        lr_decay: The factor.
        acc_thresh: The relative loss of accuracy, compared with the best so far, that causes no decay.
    """

    needs_accuracy = True

    lr_decay: float = 0.9
    acc_thresh: float = 0.05
    best_acc: float = field(default=0.0, init=False)
    num_decays: int = field(default=0, init=False)

    def observe(self, accuracy: float) -> None:
        """Process a validation accuracy, and decay if it is too far below the best one."""
        if accuracy < self.best_acc * (1 - self.acc_thresh):
            self.num_decays += 1
        self.best_acc = max(self.best_acc, accuracy)

    def state_dict(self) -> dict[str, float]:
        """Return the best accuracy and the number of decays."""
        return {"best_acc": self.best_acc, "num_decays": self.num_decays}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Set the best accuracy and the number of decays."""
        self.best_acc, self.num_decays = float(state["best_acc"]), int(state["num_decays"])

    def _decayed(self, lr: float) -> float:
        # The floor never raises a learning rate that was below it from the start.
        return max(min(lr, self.lr_min), lr * self.lr_decay**self.num_decays)


@dataclass(kw_only=True)
class DecayWhenAcc(_DecayWithAccuracy):
    """`initial_lr`, multiplied by `lr_decay` whenever accuracy falls, not below `lr_min`.

    Example:
        >>> schedule = DecayWhenAcc(initial_lr=1.0, lr_decay=0.5)
        >>> [schedule.get_lr(accuracy) for accuracy in (0.5, 0.8, 0.79, 0.7)]
        [1.0, 1.0, 1.0, 0.5]
    """

    unit = "accuracy"

    initial_lr: float = 0.01

    def at(self, count: float) -> float:
        """Return the value after the accuracies so far."""
        return self._decayed(self.initial_lr)

    def get_lr(self, x: float) -> float:
        """Process the accuracy `x` and return the value after it."""
        self.observe(x)
        # `at` does not use the count: the value depends on the accuracies alone.
        return super().get_lr(0)


@dataclass(kw_only=True)
class TriangularDecayWhenAcc(_DecayWithAccuracy):
    """`Triangular`, multiplied by `lr_decay` whenever accuracy falls, not below `lr_min`.

    Example:
        >>> schedule = TriangularDecayWhenAcc(stepsize=10, lr_decay=0.5)
        >>> schedule.get_lr(10, 0.8), schedule.get_lr(10), schedule.get_lr(10, 0.7)
        (1.0, 1.0, 0.5)
    """

    def at(self, count: float) -> float:
        """Return the value `count` updates after the start, with the accuracies so far."""
        return self._decayed(self._between(_triangle(count, self.stepsize)))

    def get_lr(self, x: float, accuracy: float | None = None) -> float:
        """Process the accuracy, if there is one, and return the value after `x` updates."""
        if accuracy is not None:
            self.observe(accuracy)
        return super().get_lr(x)


@dataclass(kw_only=True)
class MtmScheduler(Schedule):
    """A momentum between `mtm_min` and `mtm_max`. A subclass defines it in `at`."""

    key = "momentum"

    mtm_min: float = 1e-3
    mtm_max: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.mtm_min, self.mtm_max
        if not 0 <= low <= high < 1:
            raise ConfigError(f"{type(self).__name__}: expected 0 <= mtm_min <= mtm_max < 1, got {low} and {high}")


@dataclass(kw_only=True)
class TriangularMtm(MtmScheduler):
    """The momentum for `Triangular`: low when the learning rate is high.

    Example:
        >>> schedule = TriangularMtm(mtm_min=0.5, mtm_max=0.75, stepsize=10)
        >>> schedule.get_lr(0), schedule.get_lr(10), schedule.get_lr(20)
        (0.75, 0.5, 0.75)
    """

    def at(self, count: float) -> float:
        """Return the momentum `count` updates after the start."""
        return self.mtm_max - (self.mtm_max - self.mtm_min) * _triangle(count, self.stepsize)


# The names of lernomatic.
LinearDecayScheduler = LinearDecay
LogDecayScheduler = LogDecay
ExponentialDecayScheduler = ExponentialDecay
WarmRestartScheduler = WarmRestart
TriangularScheduler = Triangular
InvTriangularScheduler = InvTriangular
TriangularExpScheduler = TriangularExp
Triangular2Scheduler = Triangular2
Triangular2ExpScheduler = Triangular2Exp
EpochSetScheduler = EpochSet
TriangularDecayWhenAccScheduler = TriangularDecayWhenAcc
DecayWhenAccScheduler = DecayWhenAcc
DecayWhenEpochScheduler = DecayWhenEpoch
DecayToEpochScheduler = DecayToEpoch
TriangularMtmScheduler = TriangularMtm


def _triangle(count: float, stepsize: float) -> float:
    """Return the height, between 0 and 1, of a triangle wave that starts at 0."""
    return 1 - abs(count / stepsize % 2 - 1)


def _halving_triangle(count: float, stepsize: float) -> float:
    return _triangle(count, stepsize) * math.pow(0.5, count // (2 * stepsize))
