"""Learning-rate scheduler together with the interval at which the loop steps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from dovetail.trainers.schedules import ScheduleLR

__all__ = ["BoundScheduler", "Interval", "bind_scheduler"]

Interval = Literal["update", "batch", "epoch", "manual"]


@dataclass
class BoundScheduler:
    """A learning-rate scheduler and when it steps.

    Attributes:
        scheduler: Any scheduler of torch, or one of ours bound to an optimizer.
        interval: `update` counts the real steps of its own optimizer, `batch` the batches (caught up at the next
            update, never between two), `epoch` the epochs; `manual` is stepped by its owner.
        frequency: Step at every n-th of these.
        stepper: Called in place of the scheduler's own `step`, if given.
        monitor: The metric that `ReduceLROnPlateau` and its like are given.
    """

    # Torch gives its schedulers no common type: `step` takes nothing, an epoch, or a metric.
    scheduler: Any
    interval: Interval = "epoch"
    frequency: int = 1
    monitor: str = "valid_loss"
    stepper: Callable[[], None] | None = None
    count: int = 0
    batches: int = 0
    takes_metric: bool = False

    def __post_init__(self) -> None:
        self.takes_metric = isinstance(self.scheduler, ReduceLROnPlateau) or bool(
            getattr(self.scheduler, "takes_metric", False)
        )

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose learning rate is scheduled."""
        optimizer: Optimizer = self.scheduler.optimizer
        return optimizer

    def advance(self, number: int, metrics: Mapping[str, float] | None) -> None:
        """Count `number` more intervals and step after every `frequency` of them."""
        for _ in range(number):
            self.count += 1
            if self.count % self.frequency == 0:
                self._step(metrics)

    def _step(self, metrics: Mapping[str, float] | None) -> None:
        if self.stepper is not None or not self.takes_metric:
            (self.stepper or self.scheduler.step)()
            return
        value = (metrics or {}).get(self.monitor)
        if value is None:
            value = (metrics or {}).get(self.monitor.replace("valid_", "train_"))
        if value is not None:
            self.scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the counters."""
        return {"scheduler": self.scheduler.state_dict(), "count": self.count, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self.count, self.batches = int(state["count"]), int(state["batches"])


def bind_scheduler(scheduler: LRScheduler | ReduceLROnPlateau, *, on_batch: bool = False) -> BoundScheduler:
    """Return a scheduler with its interval: that of our schedules, per update for one-cycle kinds, else per epoch."""
    interval: Interval = "epoch"
    if isinstance(scheduler, ScheduleLR):
        interval = scheduler.interval
    elif on_batch or isinstance(scheduler, (OneCycleLR, CyclicLR)):
        interval = "batch" if on_batch else "update"
    monitor = "valid_accuracy" if isinstance(scheduler, ScheduleLR) else "valid_loss"
    return BoundScheduler(scheduler, interval, monitor=monitor)
