"""Learning-rate scheduler together with the interval at which the loop steps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from dovetail.errors import ConfigError
from dovetail.trainers.schedules import RunScheduleLR, ScheduleLR

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


Interval = Literal["update", "batch", "epoch", "manual"]


@dataclass
class BoundScheduler:
    """A learning-rate scheduler and its interval.

    Attributes:
        scheduler: Any scheduler of torch, or one of ours bound to an optimizer.
        interval: `update` counts the real steps of the scheduler's optimizer, `batch` the batches (applied at the next
            update), `epoch` the epochs; `manual` is stepped by its owner.
        frequency: Step at every n-th of these.
        stepper: Called in place of the scheduler's own `step`, if given.
        monitor: The metric for `ReduceLROnPlateau` and similar schedulers.
    """

    # Torch schedulers have no common type: `step` takes nothing, an epoch, or a metric.
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
        """Step the scheduler; if it follows a metric, only with a value of the metric."""
        if self.stepper is not None or not self.takes_metric:
            (self.stepper or self.scheduler.step)()
            return
        value = (metrics or {}).get(self.monitor)
        if value is None:
            # Without validation data, a plateau of the training loss counts.
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
    """Return a scheduler with its interval: our schedules have their own; one-cycle kinds update, all others epoch."""
    interval: Interval = "epoch"
    if isinstance(scheduler, ScheduleLR):
        interval = scheduler.interval
    elif isinstance(scheduler, RunScheduleLR):
        interval = "update"
    elif on_batch or isinstance(scheduler, (OneCycleLR, CyclicLR)):
        interval = "batch" if on_batch else "update"
    monitor = "valid_accuracy" if isinstance(scheduler, ScheduleLR) else "valid_loss"
    return BoundScheduler(scheduler, interval, monitor=monitor)


def step_schedulers(context: TrainingContext, interval: str, metrics: Mapping[str, float] | None) -> None:
    """Advance the schedulers of an interval; schedulers that count batches catch up at updates.

    Raises:
        ConfigError: A schedule follows the accuracy, and the run does not measure it.
    """
    for bound in context.schedulers:
        if bound.interval == "batch":
            if interval == "update":
                # The loop counts the running batch after this call, so it is added here.
                bound.advance(context.progress.batches + 1 - bound.batches, metrics)
                bound.batches = context.progress.batches + 1
            continue
        if interval == "epoch" and isinstance(bound.scheduler, ScheduleLR) and bound.scheduler.needs_accuracy:
            observed = (metrics or {}).get("valid_accuracy")
            # A missing accuracy is an error only if no later validation can bring it: epochs between two validations
            # have none either.
            if observed is None and (
                context.run.plan is None
                or context.run.plan.validate is None
                or context.run.validated_at == context.progress.batches
            ):
                raise ConfigError(
                    f"lr_scheduler: {bound.scheduler.schedule!r} follows 'valid_accuracy', which this run does not "
                    "measure; give validation data and metrics={'accuracy': …}, or another schedule"
                )
            if observed is not None and not bound.takes_metric:
                bound.scheduler.observe(observed)
        # With several optimizers, an update may step only some of them; the schedules of the others do not move.
        if bound.interval == interval and (interval == "epoch" or bound.optimizer in context.run.batch.stepped):
            bound.advance(1, metrics)
