"""Learning-rate scheduler strategies: torch's schedulers, warm-up, and schedulers with timm's interface.

Every strategy here has two keywords: the scheduler steps at every `interval` (`epoch`, `update` or `batch`), or with
`frequency` at every n-th of these. The lengths of a schedule (`step_size`, `T_max`, …) are counted in such steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers import other_libraries
from dovetail.trainers.catalog import schedulers
from dovetail.trainers.schedules import ScheduleLR
from dovetail.trainers.strategies.base import LRSchedulerStrategy, Strategy
from dovetail.trainers.strategies.nesting import Described, Nesting
from dovetail.units import check_count

if TYPE_CHECKING:
    from dovetail.trainers.context import Interval, TrainingContext


def step_scheduler(
    scheduler: Any, context: TrainingContext, *, monitor: str = "valid_loss", interval: Interval = "epoch"
) -> None:
    """Advance a scheduler; a scheduler that follows a metric receives it, and does not step without a new value.

    Args:
        scheduler: A scheduler of torch or one of our schedules; None means a constant rate.
        context: The context of the run.
        monitor: A metric of the validation. Without validation, and for other intervals than `epoch`, it is the loss of
            the last batch, as for `last_loss`.
        interval: When the scheduler steps.
    """
    if scheduler is None:
        return
    if isinstance(scheduler, ScheduleLR) and scheduler.takes_metric:
        monitor = "valid_accuracy"
    elif not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
        return
    value = _observed(context, monitor, interval)
    if value is not None:
        scheduler.step(float(value))


def _observed(context: TrainingContext, monitor: str, interval: Interval) -> Any:
    """Return the value that a scheduler follows, a metric or the last loss; None if there is no new one."""
    validation = context.run.validation
    if monitor == "last_loss" or not validation or interval != "epoch":
        return context.state.get("last_loss")
    if monitor not in validation:
        raise UnknownNameError("metric", monitor, validation)
    # Do not repeat an old value: the scheduler would count it as an epoch without improvement.
    return validation[monitor] if context.run.validated_at == context.progress.batches else None


@dataclass(eq=False, repr=False)
class TimedSchedulerStrategy(Described, LRSchedulerStrategy):
    """Base of scheduler strategies whose interval and frequency are settings.

    Args:
        interval: The scheduler steps at every `epoch`, `update` or `batch`.
        frequency: Step at every n-th of these.
    """

    interval: Interval = field(default="epoch", kw_only=True)
    frequency: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.interval not in ("epoch", "update", "batch"):
            hint = other_libraries.did_you_mean(self.interval, other_libraries.INTERVALS)
            raise ConfigError(f"interval: expected 'epoch', 'update' or 'batch', got {self.interval!r}{hint}")
        check_count("frequency", self.frequency)

    def step(self, scheduler: Any, context: TrainingContext) -> None:
        """Advance the scheduler."""
        step_scheduler(scheduler, context, interval=self.interval)


@dataclass(eq=False, repr=False)
class DefaultLRSchedulerStrategy(TimedSchedulerStrategy):
    """The given scheduler, or else the scheduler that the configuration names, or else none.

    Args:
        scheduler_fn: A callable of the optimizer. None means `config["lr_scheduler"]`, a registered name, with the
            arguments `config["parameters"]["learning_rate"]`. With `config["global_lr_scheduler"]`, the schedule
            continues after the `config["epochs_before"]` epochs of earlier runs; all runs together have
            `config["total_epochs"]`.

    Example:
        >>> from functools import partial
        >>> DefaultLRSchedulerStrategy(partial(lr_scheduler.StepLR, step_size=3), interval="update")
        DefaultLRSchedulerStrategy(scheduler_fn=partial(StepLR, step_size=3), interval='update')
    """

    scheduler_fn: Callable[[Optimizer], Any] | None = None

    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> Any:
        """Return the scheduler, or None."""
        if self.scheduler_fn is not None:
            return self.scheduler_fn(optimizer)
        config = context.config
        name = config.get("lr_scheduler")
        if name is None:
            return None
        arguments = dict(config.get("parameters", {}).get("learning_rate", {}))
        continues = bool(config.get("global_lr_scheduler")) and "epochs_before" in config
        if continues and self.interval != "epoch":
            # The number of updates in the earlier runs is unknown.
            raise ConfigError(f"global_lr_scheduler: expected interval='epoch', got {self.interval!r}")
        if name == "CosineAnnealingLR" and self.interval == "epoch" and "epochs" in config:
            epochs = config.get("total_epochs", config["epochs"]) if continues else config["epochs"]
            # One half cosine over the whole training, unless the configuration has another length.
            arguments.setdefault("T_max", max(1, epochs // self.frequency))
        scheduler = schedulers.get(name)(optimizer, **arguments)
        if continues:
            _replay(scheduler, config["epochs_before"] // self.frequency)
        return scheduler


@dataclass(eq=False, repr=False)
class NoSchedulerStrategy(Described, LRSchedulerStrategy):
    """A constant learning rate.

    Example:
        >>> NoSchedulerStrategy().create_scheduler(None, context=None) is None
        True
    """

    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Return None."""


@dataclass(eq=False, repr=False)
class TorchSchedulerStrategy(TimedSchedulerStrategy):
    """Base of strategies for a torch scheduler whose arguments are the positional fields of the strategy."""

    scheduler_class: ClassVar[Callable[..., Any]]

    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> Any:
        """Return the scheduler."""
        # `interval`, `frequency` and `monitor` are keyword-only, and no arguments of torch's class.
        settings = {each.name: getattr(self, each.name) for each in fields(self) if not each.kw_only}
        return type(self).scheduler_class(optimizer, **settings)


@dataclass(eq=False, repr=False)
class StepLRSchedulerStrategy(TorchSchedulerStrategy):
    """Multiplies the rate by `gamma` every `step_size` steps.

    Example:
        >>> StepLRSchedulerStrategy(step_size=3, interval="update", frequency=2)
        StepLRSchedulerStrategy(step_size=3, interval='update', frequency=2)
    """

    scheduler_class = lr_scheduler.StepLR

    step_size: int = 10
    gamma: float = 0.1


@dataclass(eq=False, repr=False)
class MultiStepLRSchedulerStrategy(TorchSchedulerStrategy):
    """Multiplies the rate by `gamma` at every milestone.

    Example:
        >>> MultiStepLRSchedulerStrategy(milestones=[30, 60])
        MultiStepLRSchedulerStrategy(milestones=[30, 60])
    """

    scheduler_class = lr_scheduler.MultiStepLR

    milestones: Sequence[int]
    gamma: float = 0.1


@dataclass(eq=False, repr=False)
class ExponentialLRSchedulerStrategy(TorchSchedulerStrategy):
    """Multiplies the rate by `gamma` at every step.

    Example:
        >>> ExponentialLRSchedulerStrategy(gamma=0.9)
        ExponentialLRSchedulerStrategy(gamma=0.9)
    """

    scheduler_class = lr_scheduler.ExponentialLR

    gamma: float = 0.95


@dataclass(eq=False, repr=False)
class CosineAnnealingLRSchedulerStrategy(TorchSchedulerStrategy):
    """Half a cosine from the optimizer's rate down to `eta_min`, in `T_max` steps.

    Example:
        >>> CosineAnnealingLRSchedulerStrategy(T_max=50)
        CosineAnnealingLRSchedulerStrategy(T_max=50)
    """

    scheduler_class = lr_scheduler.CosineAnnealingLR

    T_max: int
    eta_min: float = 0.0


@dataclass(eq=False, repr=False)
class CosineAnnealingWarmRestartsSchedulerStrategy(TorchSchedulerStrategy):
    """Consecutive cosines: the first takes `T_0` steps, each of the others `T_mult` times the previous length.

    Example:
        >>> CosineAnnealingWarmRestartsSchedulerStrategy(T_0=10, T_mult=2)
        CosineAnnealingWarmRestartsSchedulerStrategy(T_0=10, T_mult=2)
    """

    scheduler_class = lr_scheduler.CosineAnnealingWarmRestarts

    T_0: int
    T_mult: int = 1
    eta_min: float = 0.0


@dataclass(eq=False, repr=False)
class ReduceLROnPlateauSchedulerStrategy(TorchSchedulerStrategy):
    """Multiplies the rate by `factor` when a metric has not improved for `patience` steps.

    Args:
        mode: Whether small (`min`) or large (`max`) values of the metric are better.
        factor: The factor of a reduction.
        patience: Steps without improvement before a reduction.
        threshold: The smallest change that counts as an improvement.
        threshold_mode: Whether the threshold is relative (`rel`) or absolute (`abs`).
        cooldown: Steps after a reduction that do not count.
        min_lr: The smallest rate.
        eps: Smaller reductions are skipped.
        monitor: A metric of the validation, or `last_loss`, the loss of the last batch; a run without validation also
            uses the latter. An epoch without a validation does not count.
        interval: The interval of steps; for other intervals than `epoch` the metric is `last_loss`.
        frequency: Step at every n-th of these.

    Example:
        >>> ReduceLROnPlateauSchedulerStrategy(patience=2, monitor="valid_accuracy", mode="max")
        ReduceLROnPlateauSchedulerStrategy(mode='max', patience=2, monitor='valid_accuracy')
    """

    scheduler_class = lr_scheduler.ReduceLROnPlateau

    mode: Literal["min", "max"] = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_lr: float = 0
    eps: float = 1e-8
    monitor: str = field(default="valid_loss", kw_only=True)

    def step(self, scheduler: Any, context: TrainingContext) -> None:
        """Pass the metric to the scheduler if there is a new value."""
        step_scheduler(scheduler, context, monitor=self.monitor, interval=self.interval)


@dataclass(eq=False, repr=False)
class LinearLRSchedulerStrategy(TorchSchedulerStrategy):
    """A straight line from `start_factor` to `end_factor` times the optimizer's rate, in `total_iters` steps.

    Example:
        >>> LinearLRSchedulerStrategy(start_factor=0.5, total_iters=4)
        LinearLRSchedulerStrategy(start_factor=0.5, total_iters=4)
    """

    scheduler_class = lr_scheduler.LinearLR

    start_factor: float = 1 / 3
    end_factor: float = 1.0
    total_iters: int = 5


@dataclass(eq=False, repr=False)
class PolynomialLRSchedulerStrategy(TorchSchedulerStrategy):
    """The optimizer's rate times `(1 - t / total_iters) ** power`.

    Example:
        >>> PolynomialLRSchedulerStrategy(total_iters=50, power=2.0)
        PolynomialLRSchedulerStrategy(total_iters=50, power=2.0)
    """

    scheduler_class = lr_scheduler.PolynomialLR

    total_iters: int = 5
    power: float = 1.0


@dataclass(eq=False, repr=False)
class WarmupSchedulerStrategy(TimedSchedulerStrategy, Nesting):
    """A linear warm-up to the optimizer's rate, followed by another schedule from its start.

    Args:
        warmup_epochs: Steps of the warm-up: epochs, unless `interval` is set.
        warmup_start_lr: The initial rate.
        base_scheduler: The schedule after the warm-up; None means a constant rate.

    Raises:
        ConfigError: The schedule after the warm-up has another interval or frequency.

    Example:
        >>> import torch
        >>> strategy = WarmupSchedulerStrategy(4, 0.0, base_scheduler=StepLRSchedulerStrategy(step_size=30))
        >>> scheduler = strategy.create_scheduler(torch.optim.SGD([torch.zeros(1)], lr=1.0), context=None)
        >>> scheduler.get_last_lr(), scheduler.base.get_last_lr()
        ([0.0], [1.0])
    """

    warmup_epochs: int
    warmup_start_lr: float
    base_scheduler: LRSchedulerStrategy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("warmup_epochs", self.warmup_epochs, least=0)
        self.check_parts()
        self._check_interval()

    @property
    def parts(self) -> Sequence[Strategy]:
        """The schedule after the warm-up, if there is one."""
        return () if self.base_scheduler is None else (self.base_scheduler,)

    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> WarmupLR:
        """Return one scheduler for both schedules; its state contains both."""
        # The base first: its constructor reads the optimizer's rates, which the warm-up then lowers.
        base = None if self.base_scheduler is None else self.base_scheduler.create_scheduler(optimizer, context)
        # Some schedules know their interval only now.
        self._check_interval()
        return WarmupLR(optimizer, self.warmup_epochs, self.warmup_start_lr, base)

    def step(self, scheduler: Any, context: TrainingContext) -> None:
        """Advance the warm-up or, once it has ended, the schedule after it."""
        if not scheduler.is_warm:
            scheduler.step()
        elif self.base_scheduler is not None and scheduler.base is not None:
            self.base_scheduler.step(scheduler.base, context)

    def _check_interval(self) -> None:
        base = self.base_scheduler
        if base is not None and (base.interval, base.frequency) != (self.interval, self.frequency):
            raise ConfigError(
                f"{self!r}: the warm-up steps at every {self.frequency}. {self.interval}, the schedule after it at "
                f"every {base.frequency}. {base.interval}; give both the same interval and frequency"
            )


class WarmupLR(LRScheduler):
    """Torch scheduler for a warm-up and the schedule after it.

    Args:
        optimizer: The optimizer; its current rates are the targets of the warm-up.
        warmup_steps: The length of the warm-up.
        start_lr: The initial rate of every parameter group.
        base: A scheduler of the same optimizer for the steps after the warm-up.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> WarmupLR(optimizer, 4, 0.2).get_last_lr(), optimizer.param_groups[0]["lr"]
        ([0.2], 0.2)
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int, start_lr: float, base: Any = None) -> None:
        # All attributes before `super().__init__`, which sets the first rate of the warm-up.
        self.base = base
        self.warmup_steps = warmup_steps
        self.start_lr = start_lr
        self.target_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    @property
    def is_warm(self) -> bool:
        """True if the warm-up has ended."""
        return self.last_epoch >= self.warmup_steps

    def step(self, epoch: int | None = None) -> None:
        """Advance the warm-up or, once it has ended, the schedule after it."""
        if self.last_epoch < self.warmup_steps:
            super().step()
        elif self.base is not None:
            self.base.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the current rates, of the warm-up or of the schedule after it."""
        if self.is_warm and self.base is not None:
            rates: list[float | Tensor] = self.base.get_last_lr()
            return rates
        return super().get_last_lr()

    def get_lr(self) -> list[float | Tensor]:
        """Return the current rates of the warm-up."""
        if self.last_epoch >= self.warmup_steps:
            return list(self.target_lrs)
        share = self.last_epoch / self.warmup_steps
        return [self.start_lr + (target - self.start_lr) * share for target in self.target_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the warm-up, and the state of the schedule after it."""
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "target_lrs": list(self.target_lrs),
            "last_lr": [float(rate) for rate in self._last_lr],
            "base": {} if self.base is None else self.base.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; the rates themselves are in the optimizer's state."""
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self.target_lrs, self._last_lr = list(state_dict["target_lrs"]), list(state_dict["last_lr"])
        if self.base is not None:
            self.base.load_state_dict(dict(state_dict["base"]))


@dataclass(eq=False, repr=False)
class TimmLRSchedulerStrategy(Described, LRSchedulerStrategy):
    """A scheduler with timm's interface, which receives the number of updates and the number of epochs.

    Args:
        scheduler_fn: Builds, from an optimizer, an object with `step_update(num_updates)`, `step(epoch)`, `state_dict`
            and `load_state_dict`.

    Example:
        >>> TimmLRSchedulerStrategy(lambda optimizer: None).interval
        'update'
    """

    scheduler_fn: Callable[[Optimizer], Any]
    interval: Interval = field(default="update", init=False)
    _scheduler: Any = field(default=None, init=False)

    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> Any:
        """Return the scheduler."""
        # Kept for `on_epoch_end`: the loop passes the scheduler to `step` only, at every update.
        self._scheduler = self.scheduler_fn(optimizer)
        return self._scheduler

    def step(self, scheduler: Any, context: TrainingContext) -> None:
        """Pass the number of updates to the scheduler."""
        scheduler.step_update(context.progress.updates)

    def on_epoch_end(self, context: TrainingContext) -> None:
        """Pass the number of epochs to the scheduler."""
        self._scheduler.step(context.progress.epoch)


def _replay(scheduler: Any, steps: int) -> None:
    """Advance a new scheduler by a number of steps."""
    with warnings.catch_warnings():
        # Torch warns of scheduler steps before the first optimizer step, which are intended here.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps):
            scheduler.step()
