"""Callbacks of a trial: who watches, by the names that trials know."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError, UnknownNameError


class PyTorchCallback:
    """Watches a trial. Override the hooks you need; they are listed in the order in which they are called.

    Every process of a run calls every hook, except those about written checkpoints, which the first one alone calls.

    Example:
        >>> class Announce(PyTorchCallback):
        ...     def on_validation_end(self, metrics):
        ...         print(f"validation: {metrics['loss']:.3f}")
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Once, before data is made and a checkpoint is loaded.

        Args:
            first_batch_idx: Batches that were trained before.
            checkpoint_uuid: The path of the checkpoint that training resumes from, or None.
        """

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Before the state of a checkpoint is taken; with what `on_checkpoint_save_start` put there."""

    def on_training_start(self) -> None:
        """Once, before the first batch, with all state in place."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Before the first batch of an epoch; not again when an epoch is resumed in its middle."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """After the last batch of an epoch and the learning rates that change with it, before any validation."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Wherever training metrics are reported: at every reporting period, validation and checkpoint.

        Args:
            avg_metrics: Means since the last time, over the samples of all processes.
            batch_metrics: The metrics of each batch of this process since then.
        """

    def on_validation_start(self) -> None:
        """Before every validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the first batch of a validation."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """After the last batch of a validation, with what `evaluate_batch` returned for each batch of this process."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """After every validation, with its metrics over all processes."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is written. What is added to the dictionary is kept; what is there is for reading."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """After a checkpoint was written.

        Args:
            checkpoint_dir: A folder in it, `user`, for files of your own; they go when the checkpoint goes.
        """

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """After a checkpoint is where it belongs.

        It is called once for each batch that a checkpoint belongs to, even if that is written twice, as the periodic
        and as the best one.

        Args:
            uuid: The path of the checkpoint, which `fit(latest_checkpoint=…)` accepts. The best one has the same path
                each time, if no other is written at its batch.
        """

    def on_trial_shutdown(self) -> None:
        """Once, at the very end, whether or not training failed."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep for this callback; nothing by default."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def checked_callbacks(callbacks: Any) -> dict[str, PyTorchCallback]:
    """Return what `build_callbacks` has returned; raise if it is something else, or has a hook that nothing calls."""
    if not isinstance(callbacks, Mapping) or not all(isinstance(it, PyTorchCallback) for it in callbacks.values()):
        raise ConfigError(f"build_callbacks: expected PyTorchCallback objects by name, got {callbacks!r}")
    hooks = [name for name in vars(PyTorchCallback) if not name.startswith("_")]
    for callback in callbacks.values():
        kind = type(callback)
        for name in dir(kind):
            if name.startswith("on_") and name not in hooks and callable(getattr(kind, name)):
                raise UnknownNameError(f"hook of {kind.__name__}, a PyTorchCallback,", name, hooks, _HOOKS)
        if not _takes_epoch(callback):
            warnings.warn(
                f"{kind.__name__}.on_training_epoch_start() without parameters is deprecated: add epoch_idx",
                FutureWarning,
                stacklevel=2,
            )
    return dict(callbacks)


def start_epoch(callback: PyTorchCallback, epoch: int) -> None:
    """Call `on_training_epoch_start`, also one from before it had a parameter."""
    hook: Any = callback.on_training_epoch_start
    hook(*[epoch] * _takes_epoch(callback))


def _takes_epoch(callback: PyTorchCallback) -> bool:
    return bool(inspect.signature(callback.on_training_epoch_start).parameters)


# What other versions of Determined and other libraries call them.
_HOOKS = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_train_epoch_start": "on_training_epoch_start",
    "on_train_epoch_end": "on_training_epoch_end",
    "on_train_start": "on_training_start",
    "on_train_end": "on_trial_shutdown",
    "on_fit_end": "on_trial_shutdown",
}
