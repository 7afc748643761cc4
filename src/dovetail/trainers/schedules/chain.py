"""Torch schedulers of a known length that can be chained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dovetail.errors import ConfigError


class SchedulerBase(LRScheduler):
    """A torch scheduler of known length, whose learning rates are a function of the step.

    A subclass defines `lrs_at`, or `get_lr` as in torch, which reads `last_epoch` or `_step_count`.

    Args:
        optimizer: The optimizer whose learning rates are set.
        total_iters: The length; afterwards the last learning rates stay.
        eta_min: The smallest learning rate.
        last_epoch: The steps before the first one, counted as in torch; -1 for a new schedule.

    Raises:
        ConfigError: The length is not above 0.
        TypeError: The class defines neither method.
    """

    def __init__(self, optimizer: Optimizer, total_iters: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        kind = type(self)
        # The two default methods call each other, so a class that defines neither would recurse without end.
        if kind.lrs_at is SchedulerBase.lrs_at and kind.get_lr is SchedulerBase.get_lr:
            raise TypeError(f"{kind.__name__}: expected a class that defines lrs_at(step) or get_lr()")
        if total_iters <= 0:
            raise ConfigError(f"{type(self).__name__}: total_iters: expected a number above 0, got {total_iters!r}")
        self.total_iters = total_iters
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the learning rate of every parameter group after `step` steps, at most `total_iters`."""
        # Called if the class defines `get_lr`, which needs the counters of that step.
        before = self.last_epoch, self._step_count
        self.last_epoch, self._step_count = step, step + 1
        try:
            return self.get_lr()
        finally:
            self.last_epoch, self._step_count = before

    def get_lr(self) -> list[float | Tensor]:
        """Return the current learning rate of every parameter group."""
        return self.lrs_at(min(self.last_epoch, self.total_iters))

    def _between(self, height: float) -> list[float | Tensor]:
        return [self.eta_min + (base - self.eta_min) * height for base in self.base_lrs]


class WarmUpScheduler(SchedulerBase):
    """A linear increase from `eta_min` to the optimizer's own learning rate.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> WarmUpScheduler(optimizer, total_iters=4).lrs_at(1)
        [0.25]
    """

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the learning rate of every parameter group after `step` steps."""
        return self._between(step / self.total_iters)


class CosineAnnealingScheduler(SchedulerBase):
    """Half a cosine from the optimizer's own learning rate down to `eta_min`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> CosineAnnealingScheduler(optimizer, total_iters=4).lrs_at(4)
        [0.0]
    """

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the learning rate of every parameter group after `step` steps."""
        return self._between((1 + math.cos(math.pi * step / self.total_iters)) / 2)


class SchedulerChain(SchedulerBase):
    """Several schedulers of one optimizer in sequence. Only the chain is stepped.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> chain = SchedulerChain(WarmUpScheduler(optimizer, 2), CosineAnnealingScheduler(optimizer, 4))
        >>> chain.total_iters, [round(chain.lrs_at(step)[0], 4) for step in range(7)]
        (6, [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0])

    Raises:
        ConfigError: There is no scheduler, or they have different optimizers.
    """

    def __init__(self, *schedulers: SchedulerBase) -> None:
        if not schedulers:
            raise ConfigError("SchedulerChain: expected at least one scheduler, got none")
        optimizer = schedulers[0].optimizer
        if any(scheduler.optimizer is not optimizer for scheduler in schedulers):
            raise ConfigError("SchedulerChain: expected schedulers of one optimizer, got several optimizers")
        self.schedulers = schedulers
        super().__init__(optimizer, sum(scheduler.total_iters for scheduler in schedulers))

    @property
    def next_iters(self) -> list[int]:
        """The steps at which the next scheduler starts: one number less than there are schedulers."""
        return list(accumulate(scheduler.total_iters for scheduler in self.schedulers[:-1]))

    def lrs_at(self, step: int) -> list[float | Tensor]:
        """Return the learning rate of every parameter group after `step` steps."""
        # The last scheduler also defines the rates after the end of the chain.
        *earlier, last = self.schedulers
        for scheduler in earlier:
            if step < scheduler.total_iters:
                return scheduler.lrs_at(step)
            step -= scheduler.total_iters
        return last.lrs_at(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the chain and of its schedulers."""
        return super().state_dict() | {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "schedulers"})
