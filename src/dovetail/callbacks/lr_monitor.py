"""Callback that records learning rates and momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.callbacks.base import Callback
from dovetail.errors import ConfigError
from dovetail.units import Epochs, TrainUnit, Updates

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class LRMonitor(Callback):
    """Record the learning rate and momentum of every parameter group in the history, under the stage `lr`.

    A row has the position of training and the rates of the next update. The names are `group0`, `group0_momentum`,
    `group1`, …; the names for further optimizers start with `optimizer1_`. The momentum of Adam and similar optimizers
    is their first beta.

    Args:
        every: `Epochs(n)`: at the start of every n-th epoch; `Updates(n)`: before the first and after every n-th.

    Example:
        >>> import torch
        >>> from dovetail.trainers.context import TrainingContext
        >>> context = TrainingContext()
        >>> context.optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)]
        >>> LRMonitor().on_epoch_start(context)
        >>> context.history.rows
        [{'stage': 'lr', 'epoch': 0, 'batches': 0, 'updates': 0, 'group0': 0.1, 'group0_momentum': 0.9}]
    """

    def __init__(self, every: TrainUnit | None = None) -> None:
        unit = Epochs(1) if every is None else every
        if not isinstance(unit, (Epochs, Updates)) or unit.length < 1:
            raise ConfigError(f"LRMonitor: every: expected Epochs(n) or Updates(n) with n of at least 1, got {every!r}")
        self.every = unit
        self._updates = unit.length if isinstance(unit, Updates) else None

    def on_train_start(self, context: TrainingContext) -> None:
        # A resumed run has recorded the rates of its next update before the checkpoint.
        if self._updates is not None and context.progress.updates == 0:
            _record(context)

    def on_epoch_start(self, context: TrainingContext) -> None:
        # The loop does not call this for an epoch that is resumed, and the restored history has its row.
        if self._updates is None and context.progress.epoch % self.every.length == 0:
            _record(context)

    def on_update(self, context: TrainingContext) -> None:
        if self._updates is not None and context.progress.updates % self._updates == 0:
            _record(context)


def _record(context: TrainingContext) -> None:
    """Add a row with the current rates of all parameter groups to the history."""
    rates: dict[str, Any] = {}
    for place, optimizer in enumerate(context.optimizers):
        owner = f"optimizer{place}_" if place else ""
        for number, group in enumerate(optimizer.param_groups):
            name = f"{owner}group{number}"
            rates[name] = group["lr"]
            if "momentum" in group:
                rates[f"{name}_momentum"] = group["momentum"]
            elif "betas" in group:
                rates[f"{name}_momentum"] = group["betas"][0]
    progress = context.progress
    context.history.record("lr", rates, epoch=progress.epoch, batches=progress.batches, updates=progress.updates)
