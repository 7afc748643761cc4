"""When checkpoints are written, under which names, and which of them stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail import checkpoint as store
from dovetail.callbacks import mode_of
from dovetail.errors import CheckpointError, ConfigError
from dovetail.history import History

if TYPE_CHECKING:
    from dovetail.trainers.base import Trainer

__all__ = ["Saver", "checkpoint", "load", "resume", "save"]


@dataclass
class Saver:
    """The checkpoints of one trainer: where they lie and which ones are kept.

    Attributes:
        directory: The folder of the checkpoints.
        name: The first part of their names.
        keep_best: Whether the best validation so far has a checkpoint of its own, `best_<name>`.
        monitor: What "best" means; None for `valid_accuracy` where there is one, else `valid_loss`.
        mode: Whether smaller (`min`) or larger (`max`) is better; None follows the monitor's name.
        keep_last: How many of the periodic checkpoints stay; None for all.
        keep_history: Whether the history is written to `<name>_history.jsonl`, row by row.
        on_error: Whether a failed write ends training or is only told.
        saved_at: The batch of the newest checkpoint.
        best: The best value so far.
        improved: Whether the last validation set it and is not written yet.
    """

    directory: Path
    name: str = "ck"
    keep_best: bool = False
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    keep_last: int | None = None
    keep_history: bool = False
    on_error: Literal["raise", "warn"] = "raise"
    saved_at: int = -1
    best: float | None = None
    improved: bool = False

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name or self.name.startswith("."):
            raise ConfigError(f"checkpoint_name: expected a plain file name, got {self.name!r}")

    def consider(self, metrics: Mapping[str, float]) -> None:
        """Note whether a validation is strictly better than all before; the next checkpoint writes it down."""
        monitor = self.monitor or ("valid_accuracy" if "valid_accuracy" in metrics else "valid_loss")
        value = metrics.get(monitor)
        if value is None or value != value:
            return
        mode = self.mode or mode_of(monitor)
        if self.best is None or (value < self.best if mode == "min" else value > self.best):
            self.best, self.improved = value, True

    def attach(self, history: History) -> None:
        """Write the history, now and row by row from now on, if that is wanted."""
        if self.keep_history:
            history.attach(self.directory / f"{self.name}_history.jsonl")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the best value back."""
        self.best = state["best"]


def checkpoint(trainer: Trainer, *, due: bool, final: bool = False) -> None:
    """Write `best_<name>` after a validation better than all before, and the checkpoint of this moment if it is due.

    Both are written at the end of all that happens at a batch or an epoch, so that going on from either is exact.

    Args:
        trainer: The outermost layer.
        due: Whether a period has ended.
        final: Whether training ends here: nothing is written that is up to date.
    """
    context = trainer.context
    saver, progress = context.saver, context.progress
    if saver is None:
        return
    if saver.keep_best and saver.improved:
        saver.improved = False
        save(trainer, saver.directory / f"best_{saver.name}")
    if due and not (final and saver.saved_at == progress.batches):
        save(trainer, saver.directory / f"{saver.name}_epoch_{progress.epoch}_iter_{progress.batches}")
        saver.saved_at = progress.batches
        if saver.keep_last is not None:
            store.prune(saver.directory, last=saver.keep_last, pattern=f"{saver.name}_epoch_*")


def save(trainer: Trainer, path: Path) -> Path:
    """Write the whole state of a trainer, seen from its outermost layer, and tell the callbacks."""
    context = trainer.context
    context.history.sync()
    summary = {**context.progress.state_dict(), "metrics": _latest_metrics(trainer)}
    on_error = context.saver.on_error if context.saver is not None else "raise"
    if store.save(path, trainer.state_dict(), summary=summary, on_error=on_error) is None:
        return path
    for on_checkpoint in context.callbacks.on_checkpoint:
        on_checkpoint(context, path)
    return path


def load(trainer: Trainer, path: Path) -> None:
    """Give a trainer the whole state of a checkpoint."""
    trainer.load_state_dict(store.load(path))


def resume(trainer: Trainer, source: str | Path) -> None:
    """Go on from a checkpoint: a path, or with `"auto"` the newest intact one of the trainer's directory, if any."""
    if source != "auto":
        load(trainer, Path(source))
        return
    saver = trainer.context.saver
    if saver is None:
        raise CheckpointError("resume='auto' needs a folder to look in: give the trainer a checkpoint_dir")
    newest = store.latest(saver.directory)
    if newest is not None:
        load(trainer, newest)
        saver.saved_at = trainer.context.progress.batches


def _latest_metrics(trainer: Trainer) -> dict[str, float]:
    history = trainer.context.history
    names = sorted(history.get_metric_names())
    return {name: history.get_latest_metric(name) for name in names}
