"""Checkpoints of a trainer: when they are written, their names, and which of them are kept."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from dovetail import checkpoint as store
from dovetail.accelerators import device_use
from dovetail.callbacks import mode_of
from dovetail.checkpoint.files import DISK, damaged_name, sweep
from dovetail.checkpoint.manifest import STATE
from dovetail.errors import CheckpointError, ConfigError, UnknownNameError, add_note
from dovetail.history import History
from dovetail.history.journal import RunJournal, RunState, journal_path
from dovetail.runtime.signals import Interrupted
from dovetail.trainers import other_libraries
from dovetail.trainers.fitting import restoring
from dovetail.trainers.frozen import with_base
from dovetail.trainers.options import TrainerOptions
from dovetail.units import Progress

if TYPE_CHECKING:
    from dovetail.trainers.base import Trainer
    from dovetail.trainers.context import TrainingContext


# Options for the periodic checkpoints to keep, and their names in `Saver.retention`.
RETENTION = {"keep_last": "last", "keep_best": "best", "keep_every": "every"}


@dataclass
class Saver:
    """Settings and state of the checkpoints of one trainer.

    Attributes:
        directory: The folder of the checkpoints.
        name: The prefix of their names.
        keep_best: True to keep a separate checkpoint of the best validation so far, `best_<name>`.
        monitor: The metric of "best"; None means `valid_accuracy` if there is one, else `valid_loss`.
        mode: Whether smaller (`min`) or larger (`max`) values are better; None derives this from the monitor's name.
        after_validation: True to write a checkpoint after every validation.
        retention: The periodic checkpoints to keep: `last`, `best` (by the monitor) and `every`, as in
            `dovetail.checkpoint.retain`; empty means all.
        keep_history: True to write the history to `<name>_history.jsonl`, row by row.
        on_error: Whether a failed write ends training (`raise`) or only warns (`warn`).
        in_background: True to write checkpoints in a thread while training continues.
        saved_at: The epoch and batch of the newest checkpoint.
        best: The best value so far.
        best_of: The direction and metric of this value, such as `min valid_loss`; None if unknown.
        improved: True if the last validation was the best and is not saved yet.
        validated: True if there was a validation since the last checkpoint.
        owes: True if a periodic checkpoint is due and not written yet.
        journal: The journal beside the history file; None before the history is written.
    """

    directory: Path
    name: str = "ck"
    keep_best: bool = False
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    after_validation: bool = False
    retention: dict[str, int] = field(default_factory=dict)
    keep_history: bool = False
    on_error: Literal["raise", "warn"] = "raise"
    in_background: bool = False
    saved_at: tuple[int, int] | None = None
    best: float | None = None
    best_of: str | None = None
    improved: bool = False
    owes: bool = False
    validated: bool = False
    journal: RunJournal | None = None
    writer: store.AsyncWriter | None = None
    # The checkpoint that the thread is writing: callbacks are called when it is on the disk.
    writing: Path | None = None

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name or self.name.startswith("."):
            raise ConfigError(f"checkpoint_name: expected a plain file name, got {self.name!r}")

    @classmethod
    def from_options(cls, options: TrainerOptions) -> Saver:
        """Return the saver that a trainer's options describe."""
        rules = {rule: getattr(options, name) for name, rule in RETENTION.items()}
        return cls(
            Path(options.checkpoint_dir),
            options.checkpoint_name,
            # A trainer that writes any checkpoints also keeps the best one.
            keep_best=options.save_best or options.save_every != 0,
            monitor=options.best_metric,
            mode=options.best_mode,
            retention={rule: number for rule, number in rules.items() if number is not None},
            keep_history=options.save_hist,
            on_error=options.on_save_error,
            in_background=options.save_in_background,
        )

    def with_options(self, options: TrainerOptions) -> Saver:
        """Return a saver for other options; it keeps the state if directory and names are the same."""
        other = Saver.from_options(options)
        # Other paths mean other checkpoints, about which nothing is known.
        if (other.directory, other.name) == (self.directory, self.name):
            other.saved_at, other.owes = self.saved_at, self.owes
            other.best, other.best_of = self.best, self.best_of
        return other

    @property
    def best_path(self) -> Path:
        """The path of the best checkpoint."""
        return self.directory / f"best_{self.name}"

    def path(self, progress: Progress) -> Path:
        """Return the path of the periodic checkpoint at a point of training."""
        return self.directory / f"{self.name}_epoch_{progress.epoch}_iter_{progress.batches}"

    def consider(self, metrics: Mapping[str, float]) -> None:
        """Record whether a validation is strictly better than all before; the next checkpoint saves it."""
        # A checkpoint that was written at this batch, before the validation, does not contain it.
        self.saved_at = None
        self.validated = True
        monitor = self._monitor(metrics)
        value = metrics.get(monitor)
        if value is None and metrics and self.monitor is not None:
            raise UnknownNameError("metric for best_metric", monitor, metrics)
        # NaN is never the best, and would make every later comparison false.
        if value is None or value != value:
            return
        mode = self.mode or mode_of(monitor)
        best_of = f"{mode} {monitor}"
        if self.best_of not in (None, best_of):
            # Values of two metrics cannot be compared.
            self.best = None
        if self.best is None or (value < self.best if mode == "min" else value > self.best):
            self.best, self.improved = value, True
        self.best_of = best_of

    def attach(self, history: History) -> None:
        """Write the history, now and row by row from now on, if `keep_history` is set.

        A file of that name that is not a history is renamed, with a warning: the trainer has the whole history in
        memory, so a damaged file must not stop a resumed run.
        """
        if not self.keep_history:
            return
        path = self.directory / f"{self.name}_history.jsonl"
        self.journal = RunJournal(journal_path(path))
        try:
            history.attach(path, self.journal)
        except ConfigError as error:
            damaged = damaged_name(path)
            path.rename(damaged)
            history.attach(path, self.journal)
            warnings.warn(store.CheckpointWarning(f"{error}; it is kept as {damaged.name}"), stacklevel=2)

    def prune(self, metrics: Mapping[str, float]) -> None:
        """Remove the periodic checkpoints that no rule keeps."""
        if self.retention:
            rules: dict[str, Any] = dict(self.retention)
            if "best" in rules:
                monitor = self._monitor(metrics)
                rules |= {"metric": monitor, "mode": self.mode or mode_of(monitor)}
            # Before the first validation no checkpoint has the metric, and all of them are kept.
            with contextlib.suppress(UnknownNameError):
                store.prune(self.directory, pattern=f"{self.name}_epoch_*", **rules)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and whether a periodic checkpoint is pending."""
        return {"best": self.best, "best_of": self.best_of, "owes": self.owes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        best = state["best"]
        self.best, self.owes = None if best is None else float(best), bool(state["owes"])
        # Checkpoints of earlier versions do not have it.
        self.best_of = state.get("best_of")

    def _monitor(self, metrics: Mapping[str, float]) -> str:
        known = [name for name in ("valid_accuracy", "valid_loss") if name in metrics]
        # Of several validation sets, the first one decides.
        known += [name for end in ("_accuracy", "_loss") for name in metrics if name.endswith(end)]
        return self.monitor or (known[0] if known else "valid_loss")


def start_history(trainer: Trainer) -> None:
    """Attach the history file of a run, and write the start of the run with its settings to the journal beside it."""
    context, saver = trainer.context, trainer.context.run.saver
    if saver is None or not context.process.is_main:
        return
    saver.attach(context.history)
    if saver.journal is None:
        return
    from dovetail.tracking.hyperparameters import hyperparameters_of

    facts: dict[str, Any] = {"run": context.run.id, "settings": hyperparameters_of(context)}
    context.run.batch.gradient_norm = None
    # The forecast of an epoch is for one process.
    if not context.process.has_peers:
        # A part of the user may fail outside of a step; the run must not depend on its description.
        with contextlib.suppress(Exception):
            facts["explain"] = str(trainer.explain())
    saver.journal.start(
        facts,
        is_new=context.progress.batches == 0,
        num_losses=len(context.history.losses),
        probe=partial(live_values, context),
    )


def live_values(context: TrainingContext) -> dict[str, float]:
    """Return values of a running run that are cheap to read, for a sample of its journal."""
    progress = context.progress
    found: dict[str, float] = {"epoch": progress.epoch, "updates": progress.updates}
    rate = context.optimizers[0].param_groups[0]["lr"] if context.optimizers else None
    # A rate that is a tensor may be on the device.
    if isinstance(rate, float):
        found["lr"] = rate
    norm = context.run.batch.gradient_norm
    # Only a plain tensor: to read the norm of a sharded model, all processes would have to take part.
    if type(norm) is Tensor:
        found["gradient_norm"] = norm.item()
    return found | device_use(context.device)


class EndingJournal:
    """Context in which a run trains; afterwards, it writes to the journal how the run has ended.

    A class, because a generator takes twice as many calls, which counts in a run of one step.
    """

    __slots__ = ("_before", "_run")

    def __init__(self, trainer: Trainer) -> None:
        self._run = trainer.context.run

    def __enter__(self) -> None:
        self._before = None if self._run.saver is None else self._run.saver.journal

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        journal = None if self._run.saver is None else self._run.saver.journal
        # The journal of an earlier `fit`, if this one failed before it started.
        if journal is None or journal is self._before:
            return
        state: RunState = "finished"
        if error is not None:
            state = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
        journal.end(state, None if error is None else f"{type(error).__name__}: {error}")


def checkpoint(trainer: Trainer, *, due: bool, final: bool = False) -> None:
    """Write `best_<name>` after the best validation so far, and the periodic checkpoint if it is due.

    Both are written after everything else that happens at a batch or an epoch, so that a resume from either is exact.
    The best one is written first and records that the other is pending: if the process is killed between the two, the
    resumed run writes it.

    Args:
        trainer: The outermost layer.
        due: True if a period has ended.
        final: True at the end of training: a checkpoint that is up to date is not written again.
    """
    context = trainer.context
    saver, progress = context.run.saver, context.progress
    if saver is None:
        return
    due = due or (saver.after_validation and saver.validated)
    saver.validated = False
    is_current = saver.saved_at == _position(progress)
    if final and due:
        # Only the process that writes knows of a failed write, and all of them must compute the state for the next one.
        is_current = trainer.gather([is_current])[0]
    saver.owes = due and not (final and is_current)
    if saver.keep_best and saver.improved:
        saver.improved = False
        save(trainer, saver.best_path)
    if saver.owes:
        # Before the write: the checkpoint must not record itself as pending. If the write fails with a warning, the end
        # of training finds no position and tries again.
        saver.owes, saver.saved_at = False, None
        if _write(trainer, saver.path(progress)):
            saver.saved_at = _position(progress)


def save(trainer: Trainer, path: Path) -> Path:
    """Write the whole state of a trainer, from its outermost layer, and call `on_checkpoint` of the callbacks."""
    _write(trainer, path)
    return path


def _write(trainer: Trainer, path: Path) -> bool:
    """Write the state, and return whether it succeeded or continues in the background; a failure raises or warns."""
    context, saver = trainer.context, trainer.context.run.saver
    # All processes of a run compute the state; one of them writes it, unless each holds a part of it.
    state = trainer.state_dict()
    if context.run.base is not None and context.model is not None:
        state = context.run.base.without(state, context.model)
    if not context.process.is_main and context.process.peers is None:
        return True
    # The history on the disk must not be older than the checkpoint.
    context.history.sync()
    summary = {
        "run": context.run.id,
        "client_id": context.client_id,
        **context.progress.state_dict(),
        "metrics": _latest_metrics(context.history),
    }
    # One write at a time: `finish` waits for the previous one and calls the callbacks for it.
    if saver is not None and saver.in_background:
        finish(trainer)
        saver.writer = saver.writer or store.AsyncWriter(on_error=saver.on_error)
        peers = context.process.peers
        # The thread must not use the connections of training, whose messages it would mix up.
        own = None if peers is None else peers.in_background()
        saver.writer.submit(path, state, summary=summary, peers=own)
        saver.writing = path
        return True
    on_error = saver.on_error if saver is not None else "raise"
    if store.save(path, state, summary=summary, on_error=on_error, peers=context.process.peers) is None:
        return False
    if context.process.is_main:
        _notify(trainer, path)
    return True


def finish(trainer: Trainer) -> None:
    """Wait for a checkpoint that is being written in the background, and raise its error, if any."""
    saver = trainer.context.run.saver
    if saver is None or saver.writer is None:
        return
    path, saver.writing = saver.writing, None
    try:
        saver.writer.wait()
    except CheckpointError:
        saver.saved_at = None
        raise
    if path is None:
        return
    # A warning of an earlier step may have reported it.
    if saver.writer.failed:
        saver.saved_at = None
    elif trainer.context.process.is_main:
        _notify(trainer, path)


def _notify(trainer: Trainer, path: Path) -> None:
    context = trainer.context
    for on_checkpoint in context.callbacks.on_checkpoint:
        on_checkpoint(context, path)
    if context.run.saver is not None:
        context.run.saver.prune(context.run.validation)


def load(trainer: Trainer, path: Path) -> None:
    """Restore the whole state of a checkpoint in a trainer.

    Raises:
        CheckpointError: The checkpoint is damaged, or its state does not fit the trainer; the message names the file
            and the key.
    """
    _restore(trainer, path, store.load(path, peers=trainer.context.process.peers))


def _restore(trainer: Trainer, path: Path, state: dict[str, Any]) -> None:
    """Load a state into a trainer; errors name the file of the checkpoint."""
    try:
        with restoring("the state"):
            trainer.load_state_dict(with_base(state, trainer.context.model))
    except CheckpointError as error:
        raise CheckpointError(f"{path / STATE}: {error}") from error
    # An error of user code keeps its type; the note has the path.
    except Exception as error:
        add_note(error, f"the checkpoint is {path}")
        raise


def resume(trainer: Trainer, source: str | Path) -> None:
    """Continue from a checkpoint: a path, or with `"auto"` the newest intact one of the trainer's directory, if any."""
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"resume: expected 'auto' or the path of a checkpoint, got {source!r}")
    if source != "auto":
        if str(source) in other_libraries.CHECKPOINTS and not Path(source).exists():
            raise CheckpointError(
                f"resume: no checkpoint at {str(source)!r}; {other_libraries.CHECKPOINTS[str(source)]}"
            )
        load(trainer, Path(source))
        return
    context, saver = trainer.context, trainer.context.run.saver
    if saver is None:
        raise CheckpointError("resume='auto' needs a folder to look in: give the trainer a checkpoint_dir")
    newest = store.load_latest(saver.directory, peers=context.process.peers)
    if newest is None:
        return
    path, state = newest
    _restore(trainer, path, state)
    # Not for `best_<name>`: at the end of training the periodic checkpoint is still written beside it.
    if path == saver.path(context.progress):
        saver.saved_at = _position(context.progress)
    # No process writes or removes files before every process has read the checkpoint.
    trainer.settle()
    # The run was killed after it wrote the best checkpoint and before it wrote the periodic one.
    if saver.owes:
        if context.process.is_main:
            saver.attach(context.history)
        checkpoint(trainer, due=True)
    if not context.process.is_main:
        return
    # If the run was killed after its last write, no later save would remove leftover files.
    saver.prune(context.run.validation)
    sweep(DISK, saver.directory)


def _position(progress: Progress) -> tuple[int, int]:
    return progress.epoch, progress.batches


def _latest_metrics(history: History) -> dict[str, float]:
    return {name: history.get_latest_metric(name) for name in sorted(history.get_metric_names())}
