"""Callback that detects a loss that is NaN or infinite."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Literal

from dovetail.callbacks.base import Callback, Report
from dovetail.errors import ConfigError, NonFiniteLossError

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

_ADVICE = "try a lower learning rate, gradient clipping, or mixed precision in bfloat16 instead of float16"


class NonFiniteLoss(Callback):
    """Detect a training loss that is NaN or infinite, and report its batch.

    The losses are checked at every reporting period, when they are on the host anyway. A few more batches may have been
    trained by then, but the callback never waits for the device.

    Args:
        action: `raise` ends training with an error, `stop` ends it normally, `warn` warns once and continues.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> context = TrainingContext()
        >>> context.progress.batch = context.progress.batches = 3
        >>> NonFiniteLoss("stop").on_report(context, Report({}, [0.5, float("nan"), 0.5], first_batch=0))
        >>> context.run.stop_reason.partition(":")[0]
        'the loss of batch 2 is nan (batch 2 of epoch 1)'
    """

    def __init__(self, action: Literal["raise", "stop", "warn"] = "raise") -> None:
        if action not in ("raise", "stop", "warn"):
            raise ConfigError(f"NonFiniteLoss: action: expected 'raise', 'stop' or 'warn', got {action!r}")
        self.action = action
        self._warned = False

    def on_train_start(self, context: TrainingContext) -> None:
        self._warned = False

    def on_report(self, context: TrainingContext, report: Report) -> None:
        # One call for the usual case. A sum of finite losses may overflow; the search below then finds no such loss.
        if math.isfinite(sum(report.losses)):
            return
        for number, loss in enumerate(report.losses, start=report.first_batch + 1):
            if not math.isfinite(loss):
                self._act(context, number, loss)
                return

    def _act(self, context: TrainingContext, number: int, loss: float) -> None:
        """Raise, stop or warn because of the loss of batch `number`, counted from 1 since the start of training."""
        progress = context.progress
        # `number` counts from the start of training; subtract the batches of earlier epochs.
        in_epoch = number - (progress.batches - progress.batch)
        message = f"the loss of batch {number} is {loss} (batch {in_epoch} of epoch {progress.epoch + 1}): {_ADVICE}"
        if self.action == "raise":
            raise NonFiniteLossError(message)
        if self.action == "stop":
            context.stop(message)
        elif not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)
