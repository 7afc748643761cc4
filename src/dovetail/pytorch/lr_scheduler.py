"""Learning-rate schedulers of PyTorch trials and their step modes."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dovetail.errors import ConfigError
from dovetail.trainers.context import BoundScheduler, Interval


class LRScheduler:
    """A torch scheduler and its step mode, as `context.wrap_lr_scheduler` returns it.

    Args:
        scheduler: Any scheduler of torch.
        step_mode: When it steps. `ReduceLROnPlateau` needs a metric, so its mode is MANUAL_STEP.
        frequency: Step at every n-th epoch, batch or optimizer step. Ignored in the mode MANUAL_STEP.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        >>> LRScheduler(halving, LRScheduler.StepMode.STEP_EVERY_EPOCH).get_last_lr()
        [1.0]
    """

    class StepMode(Enum):
        """When a scheduler steps.

        Attributes:
            STEP_EVERY_EPOCH: After every `frequency` epochs.
            STEP_EVERY_BATCH: After every `frequency` batches; batches before an update are counted at the update.
            MANUAL_STEP: Only when the trial calls `step`.
            STEP_EVERY_OPTIMIZER_STEP: After every `frequency` real steps of its optimizer.
        """

        STEP_EVERY_EPOCH = 1
        STEP_EVERY_BATCH = 2
        MANUAL_STEP = 3
        STEP_EVERY_OPTIMIZER_STEP = 4

    def __init__(self, scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1) -> None:
        given: object = step_mode
        if not isinstance(given, self.StepMode):
            names = ", ".join(mode.name for mode in self.StepMode)
            raise ConfigError(f"step_mode: expected one of LRScheduler.StepMode ({names}), got {given!r}")
        # True is an int in Python, and would mean a frequency of 1.
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            raise ConfigError(f"frequency: expected a whole number from 1 on, got {frequency!r}")
        # The loop steps a scheduler at an update or the end of an epoch, where no validation metric is known.
        if isinstance(scheduler, ReduceLROnPlateau) and given is not self.StepMode.MANUAL_STEP:
            raise ConfigError(
                f"step_mode: expected MANUAL_STEP for ReduceLROnPlateau, whose step takes a metric, got {given.name}"
            )
        # The wrapped scheduler is kept unchanged; the loop steps it through `bound`.
        self.scheduler = scheduler
        self.step_mode = step_mode
        self.frequency = frequency

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose learning rate it changes."""
        optimizer: Optimizer = self.scheduler.optimizer
        return optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler with the arguments that it takes: none, or a metric."""
        self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.scheduler.load_state_dict(state_dict)

    def bound(self) -> BoundScheduler:
        """Return the scheduler with the interval at which the loop steps it."""
        return BoundScheduler(self.scheduler, _INTERVALS[self.step_mode], self.frequency)


_INTERVALS: dict[LRScheduler.StepMode, Interval] = {
    LRScheduler.StepMode.STEP_EVERY_EPOCH: "epoch",
    LRScheduler.StepMode.STEP_EVERY_BATCH: "batch",
    LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP: "update",
    LRScheduler.StepMode.MANUAL_STEP: "manual",
}
