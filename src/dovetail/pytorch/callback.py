"""Callbacks of PyTorch trials, with the hook names of Determined."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError, UnknownNameError


class PyTorchCallback:
    """Base class of a trial's callbacks. Override the hooks you need; they are listed in call order.

    Every process of a run calls every hook, except the hooks about written checkpoints, which only the first one calls.

    Example:
        >>> class Announce(PyTorchCallback):
        ...     def on_validation_end(self, metrics):
        ...         print(f"validation: {metrics['loss']:.3f}")
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Called once, before data is built and a checkpoint is loaded.

        Args:
            first_batch_idx: Number of batches that were trained before this run.
            checkpoint_uuid: The path of the checkpoint that training resumes from, or None.
        """

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before the state of a checkpoint is restored; it contains what `on_checkpoint_save_start` added."""

    def on_training_start(self) -> None:
        """Called once, before the first batch, with all state restored."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called before the first batch of an epoch, but not if an epoch is resumed in its middle."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Called after the last batch of an epoch and its scheduler steps, before any validation."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Called when training metrics are reported: at every reporting period, validation and checkpoint.

        Args:
            avg_metrics: Means since the last report, over the samples of all processes.
            batch_metrics: The metrics of each batch of this process since then.
        """

    def on_validation_start(self) -> None:
        """Called before every validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of a validation."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Called after the last batch of a validation, with the outputs of `evaluate_batch` of this process."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called after every validation, with its metrics over all processes."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written. Added entries are stored; changes to existing ones are not."""

    # Only the first process calls this hook and the next one: checkpoints are written there.
    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Called after a checkpoint was written.

        Args:
            checkpoint_dir: The folder `user` of the checkpoint, for the callback's files; removed with it.
        """

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Called after a checkpoint is in its final place.

        It is called once per batch with a checkpoint, also if both the periodic and the best checkpoint are written
        for this batch.

        Args:
            uuid: The path of the checkpoint, which `fit(latest_checkpoint=…)` accepts. The best checkpoint always
                has the same path, unless a periodic one is written at its batch.
        """

    def on_trial_shutdown(self) -> None:
        """Called once at the end, also if training failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints store for this callback; empty by default."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""


def checked_callbacks(callbacks: Any) -> dict[str, PyTorchCallback]:
    """Return the callbacks of `build_callbacks`; raise if one is not a callback or has an unknown hook."""
    if not isinstance(callbacks, Mapping) or not all(isinstance(it, PyTorchCallback) for it in callbacks.values()):
        raise ConfigError(f"build_callbacks: expected PyTorchCallback objects by name, got {callbacks!r}")
    hooks = [name for name in vars(PyTorchCallback) if not name.startswith("_")]
    for callback in callbacks.values():
        kind = type(callback)
        # Also inherited hooks, but not attributes such as `on_gpu = True`.
        for name in dir(kind):
            if name.startswith("on_") and name not in hooks and callable(getattr(kind, name)):
                raise UnknownNameError(f"hook of {kind.__name__}, a PyTorchCallback,", name, hooks, _HOOKS)
        if not _takes_epoch(callback):
            # Older trials of Determined define the hook without a parameter.
            warnings.warn(
                f"{kind.__name__}.on_training_epoch_start() without parameters is deprecated: add epoch_idx",
                FutureWarning,
                stacklevel=2,
            )
    return dict(callbacks)


def start_epoch(callback: PyTorchCallback, epoch: int) -> None:
    """Call `on_training_epoch_start`, also the deprecated form without a parameter."""
    hook: Any = callback.on_training_epoch_start
    # One argument or none: True times a list of one item is the list.
    hook(*[epoch] * _takes_epoch(callback))


def _takes_epoch(callback: PyTorchCallback) -> bool:
    return bool(inspect.signature(callback.on_training_epoch_start).parameters)


# Names of these hooks in other versions of Determined and in other libraries.
_HOOKS = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_train_epoch_start": "on_training_epoch_start",
    "on_train_epoch_end": "on_training_epoch_end",
    "on_train_start": "on_training_start",
    "on_train_end": "on_trial_shutdown",
    "on_fit_end": "on_trial_shutdown",
}
