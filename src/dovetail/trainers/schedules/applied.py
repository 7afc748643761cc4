"""Torch scheduler that applies a schedule to an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.trainers.schedules.base import Schedule


class ScheduleLR(LRScheduler):
    """The torch scheduler that applies a `Schedule` to an optimizer.

    The value is absolute: it is set in every parameter group and replaces the group's own learning rate; a group
    with the key `lr_scale` gets the learning rate times that. Momentum is `momentum`, or the first of `betas`.
    The first value is set immediately, for the first update; each `step` sets the next one.

    Example:
        >>> import torch
        >>> from dovetail.trainers.schedules import Triangular
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=5.0)
        >>> scheduler = Triangular(lr_min=0.0, lr_max=1.0, stepsize=4).bind(optimizer)
        >>> scheduler.interval, scheduler.get_last_lr()
        ('update', [0.0])
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.25

    Args:
        optimizer: The optimizer whose learning rate or momentum is set.
        schedule: The schedule. The scheduler works with a copy, which has its own state.

    Attributes:
        interval: Whether `step` must be called after every `update` or after every `epoch`.
        key: The setting of the optimizer that is set.
        takes_metric: True if `step` takes the validation accuracy of the epoch.
        needs_accuracy: True if the schedule depends on validation accuracies. If `step` does not take them, because it
            is called after every update, `observe` does.

    Raises:
        ConfigError: The schedule sets momentum, and the optimizer has none.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        # All attributes before `super().__init__`, which calls `step` to set the first value.
        self.schedule = copy.copy(schedule)
        self.interval: Literal["update", "epoch"] = "update" if schedule.unit == "update" else "epoch"
        self.key = schedule.key
        self.takes_metric = schedule.unit == "accuracy"
        self.needs_accuracy = schedule.needs_accuracy
        self._write = set_lr if self.key == "lr" else set_momentum
        super().__init__(optimizer)

    def step(self, metrics: Tensor | float | None = None) -> None:
        """Set the next value.

        Args:
            metrics: The newest validation accuracy, for a schedule that depends on it; None if there is none.
        """
        # This replaces torch's own `step`, which warns if no update has come before. The warning does not apply here,
        # because a value depends on the count alone.
        if self.schedule.lr_history is not None and self.last_epoch >= 0:
            # The value of the update that was just made; the first call, by torch's constructor, follows no update.
            self.schedule.record(self.schedule.value(self.last_epoch))
        if metrics is not None:
            self.schedule.observe(float(metrics))
        self._step_count += 1
        self.last_epoch += 1
        self._apply()

    def observe(self, accuracy: Tensor | float) -> None:
        """Apply a validation accuracy immediately, without advancing to the next value."""
        self.schedule.observe(float(accuracy))
        self._apply()

    def get_lr(self) -> list[float | Tensor]:
        """Return the current value for every parameter group."""
        value = self.schedule.value(self.last_epoch)
        if self.key == "momentum":
            return [value for _ in self.optimizer.param_groups]
        return [value * group.get("lr_scale", 1.0) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the observed accuracies, as plain numbers."""
        history = self.schedule.lr_history
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "schedule": self.schedule.state_dict(),
            **({} if history is None else {"num_recorded": len(history)}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`, and set its value in the optimizer."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]
        self.schedule.load_state_dict(state_dict["schedule"])
        if self.schedule.lr_history is not None:
            # Otherwise the record would keep the steps of a dry run, which are undone.
            del self.schedule.lr_history[state_dict.get("num_recorded", 0) :]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, value in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            self._write(group, float(value))


def set_lr(group: dict[str, Any], value: float) -> None:
    """Set the learning rate of a parameter group."""
    # A compiled step reads the learning rate from a tensor: change its content, do not replace it.
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def set_momentum(group: dict[str, Any], value: float) -> None:
    """Set the momentum of a parameter group: `momentum`, or the first of `betas`.

    Raises:
        ConfigError: The optimizer has neither.
    """
    if "momentum" in group:
        group["momentum"] = value
    elif "betas" not in group:
        raise ConfigError("momentum: expected an optimizer with 'momentum' or 'betas', got one that has neither")
    elif isinstance(group["betas"][0], Tensor):
        group["betas"][0].fill_(value)
    else:
        group["betas"] = (value, *group["betas"][1:])
