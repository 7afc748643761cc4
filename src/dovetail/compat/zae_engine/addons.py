"""zae-engine's add-ons: the library's add-ons, with web loggers that track every step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dovetail.trainers import addons
from dovetail.trainers.addons import (
    AddOnBase,
    MultiGPUAddon,
    PrecisionMixerAddon,
    SignalHandlerAddon,
    StateManagerAddon,
)

__all__ = [
    "AddOnBase",
    "MultiGPUAddon",
    "NeptuneLoggerAddon",
    "PrecisionMixerAddon",
    "SignalHandlerAddon",
    "StateManagerAddon",
    "WandBLoggerAddon",
]

if TYPE_CHECKING:
    from dovetail.compat.zae_engine.trainer import Trainer
    from dovetail.tracking import Tracker

    class Mounted(Trainer):
        """The trainer class to which a web logger is added."""

        tracker: Tracker
else:
    Mounted = object


class _StepTracking(Mounted):
    """Tracks the numbers of every training step under their names. Only zae-engine's trainer has such steps."""

    def logging(self, step_dict: Mapping[str, Any]) -> None:
        """Append the values of a step to the log, and track its numbers if it is a training step."""
        super().logging(step_dict)
        # The tracker logs the means of a validation; all steps of a validation have the same position.
        if self.mode != "train":
            return
        # A tracker is open only during a run.
        if self.context.run.trainer is None:
            warnings.warn(
                "logging: no run is open, so these values are only in log_train; call it while `run` trains",
                UserWarning,
                stacklevel=2,
            )
            return
        self.tracker.log({name: float(self._to_cpu(it)) for name, it in step_dict.items() if _is_number(it)})


class WandBLoggerAddon(_StepTracking, addons.WandBLoggerAddon):
    """Tracks training, and the numbers of each of its steps, with Weights & Biases.

    Args:
        web_logger: `{"wandb": {…}}` with the arguments of `wandb.init`, except those that the run sets.

    Example:
        >>> from dovetail.compat.zae_engine import Trainer
        >>> trainer = Trainer.add_on(WandBLoggerAddon)(web_logger={"wandb": {"project": "digits", "config": {"a": 1}}})
        >>> trainer.tracker.hyperparameters
        {'a': 1}
    """


class NeptuneLoggerAddon(_StepTracking, addons.NeptuneLoggerAddon):
    """Tracks training, and the numbers of each of its steps, with Neptune, whose service closed in March 2026.

    Args:
        web_logger: `{"neptune": {"project_name": …, "api_tkn": …}}`; with `"mode": "offline"` nothing is sent.

    Example:
        >>> from dovetail.compat.zae_engine import Trainer
        >>> settings = {"project_name": "team/digits", "api_tkn": "secret"}
        >>> trainer = Trainer.add_on(NeptuneLoggerAddon)(web_logger={"neptune": settings})
        >>> trainer.tracker.loggers[0].project
        'team/digits'
    """


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
