"""Experiments of a store for the page: their records, and the commands that the page sends."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import DovetailError
from dovetail.history.journal import RunState
from dovetail.search.records import OVER, ExperimentError, ExperimentRecord, TrialRecord
from dovetail.search.report import flat, varied_hparams

if TYPE_CHECKING:
    from dovetail.search.store import Store

Command = Literal["pause", "resume", "cancel", "kill"]

_STATES: dict[str, RunState] = {
    "COMPLETED": "finished",
    "STOPPED": "finished",
    "ERROR": "failed",
    "INVALID_HP": "failed",
    "CANCELED": "interrupted",
    "WAITING": "interrupted",
}


class ExperimentSource:
    """The experiments of one store, read again and again.

    A store that is locked or does not respond keeps the last records, and `problem` has a sentence.

    Args:
        open: Opens the store; called when the experiments are first read, because the import takes a second.
        label: The name of the store for people, without a password.
        place: The number of the store, part of the addresses of its experiments.
    """

    def __init__(self, open: Callable[[], Store], label: str, place: int = 0) -> None:
        self.label, self.place = label, place
        self.problem: str | None = None
        self.records: dict[int, ExperimentRecord] = {}
        self._open = open
        self._store: Store | None = None
        self._finished: dict[int, Any] = {}

    @property
    def store(self) -> Store:
        """The store, which is opened at first use."""
        if self._store is None:
            self._store = self._open()
        return self._store

    def poll(self) -> bool:
        """Read the experiments, and return whether anything has changed."""
        try:
            found = self._read()
        # SQLAlchemy's errors have no common base with ours, and any failure of a database must not end the page.
        except Exception as error:
            sentence = str(error).strip().partition("\n")[0][:300] if isinstance(error, DovetailError) else None
            problem = sentence or f"the store cannot be read now: {type(error).__name__}"
            changed, self.problem = problem != self.problem, problem
            return changed
        changed = found != self.records or self.problem is not None
        self.records, self.problem = found, None
        return changed

    def _read(self) -> dict[int, ExperimentRecord]:
        from dovetail.search.store import is_over

        found = {}
        for number, attributes in self.store.attributes().items():
            # The trials of an experiment that is over need not be read again.
            if self._finished.get(number) == attributes and not self.records[number].is_running:
                found[number] = self.records[number]
                continue
            found[number] = self.store.experiment(number)
            if is_over(attributes):
                self._finished[number] = attributes
        return found

    def command(self, experiment_id: int, command: Command) -> None:
        """Pause, resume, cancel or kill an experiment.

        Raises:
            ExperimentError: The experiment is in the wrong state.
        """
        from dovetail.search.runner import request, start_detached

        record = self.store.experiment(experiment_id)
        if record.state in OVER:
            raise ExperimentError(f"experiment {experiment_id} is {record.state} already")
        if command != "resume":
            request(self.store, experiment_id, command)
        elif record.is_running:
            raise ExperimentError(f"experiment {experiment_id} runs already")
        else:
            start_detached(self.store, experiment_id)

    def kill_trial(self, experiment_id: int, trial_id: int) -> None:
        """Request that the runner ends one trial; after a while without an exit it is killed.

        Raises:
            ExperimentError: The trial does not run, or the store refers to another folder.
        """
        from dovetail.search.processes import Attempt

        record = self.store.experiment(experiment_id)
        trial = record.trial(trial_id)
        if trial.state != "RUNNING" or not record.is_running:
            raise ExperimentError(f"trial {trial_id} does not run")
        # This raises if the database names a folder outside of the store.
        folder = self.store.trials_directory(experiment_id) / trial.directory.name
        attempts = Attempt.all_of(folder)
        if not attempts:
            raise ExperimentError(f"trial {trial_id} has not started yet")
        attempts[-1].request_exit("cancel")


def trial_state(trial: TrialRecord, experiment: ExperimentRecord) -> RunState:
    """Return the state of a trial in the words of a run; a trial without a runner was killed.

    Example:
        >>> from pathlib import Path
        >>> trial = TrialRecord(7, 0, 1, "RUNNING", {}, Path("."))
        >>> trial_state(trial, ExperimentRecord(1, "a", "ACTIVE", {"searcher": {}}, Path("."), datetime(2026, 1, 1)))
        'killed'
    """
    if trial.state == "RUNNING":
        return "running" if experiment.is_running else "interrupted" if experiment.state == "PAUSED" else "killed"
    return _STATES.get(trial.state, "unknown")


def trial_rows(record: ExperimentRecord) -> list[dict[str, Any]]:
    """Return the trials as rows of a table, with the hyperparameters that differ under `hp:NAME`."""
    varied = varied_hparams(record.trials)
    best = record.best_trial
    rows = []
    for index, trial in enumerate(record.trials):
        seconds = _seconds(trial.started, trial.ended)
        rows.append(
            {
                "id": trial.id,
                "state": trial.state,
                "is_best": trial is best,
                "best": finite(trial.best),
                "best_at": trial.best_at,
                "latest": finite(trial.latest),
                "batches": trial.steps,
                "progress": trial.progress,
                "restarts": trial.restarts,
                "seconds": seconds,
                "reason": trial.reason or trial.status or "",
                **{f"hp:{name}": cell(column[index]) for name, column in varied.items()},
            }
        )
    return rows


def rungs(record: ExperimentRecord) -> list[dict[str, Any]]:
    """Return how many trials have reached each rung of successive halving, and how many ended there.

    A rung is a number of batches at which a trial was stopped by the searcher, or the length of completed trials.
    """
    stopped = [(_stopped_at(trial), trial) for trial in record.trials if trial.state == "STOPPED"]
    places = sorted({place for place, _ in stopped if place is not None})
    places += sorted({trial.steps for trial in record.trials if trial.state == "COMPLETED" and trial.steps})[-1:]
    found = []
    for place in dict.fromkeys(places):
        reached = [trial for trial in record.trials if trial.steps >= place]
        ended = [trial for at, trial in stopped if at == place]
        found.append({"batches": place, "reached": len(reached), "stopped": len(ended)})
    return found


def _stopped_at(trial: TrialRecord) -> int | None:
    match = re.search(r"after ([0-9,]+) batch", trial.reason or "")
    return int(match[1].replace(",", "")) if match else max(trial.values, default=None)


def timeline(record: ExperimentRecord) -> list[tuple[int, float, float, str]]:
    """Return id, start, end (seconds since the experiment was created) and state of every trial that has started."""
    now = datetime.now(record.created.tzinfo)
    found: list[tuple[int, float, float, str]] = []
    for trial in record.trials:
        if trial.started is not None:
            end = trial.ended or (now if record.is_running else trial.started)
            start = (trial.started - record.created).total_seconds()
            found.append((trial.id, start, max(start, (end - record.created).total_seconds()), trial.state))
    return found


def lanes(spans: Sequence[tuple[int, float, float, str]]) -> list[int]:
    """Return a lane for each span, so that spans of one lane do not overlap: the workers of an experiment.

    Example:
        >>> lanes([(1, 0.0, 5.0, ""), (2, 1.0, 2.0, ""), (3, 2.5, 4.0, ""), (4, 6.0, 7.0, "")])
        [0, 1, 1, 0]
    """
    ends: list[float] = []
    found = []
    for _, start, end, _ in spans:
        free = next((lane for lane, until in enumerate(ends) if until <= start), len(ends))
        ends[free : free + 1] = [end]
        found.append(free)
    return found


def log_of(trial: TrialRecord) -> Path:
    """Return the log file of a trial."""
    return trial.directory / "log.txt"


def finite(value: float | None) -> float | None:
    """Return a number, or None for NaN and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def settings_of(trial: TrialRecord) -> dict[str, Any]:
    """Return the hyperparameters of a trial by dotted names."""
    with suppress(RecursionError):
        return flat(trial.hparams)
    return {}


def cell(value: Any) -> Any:
    """Return a setting as a value of a table: numbers and text are kept, everything else becomes text."""
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _seconds(started: datetime | None, ended: datetime | None) -> float | None:
    if started is None:
        return None
    return max(0.0, ((ended or datetime.now(started.tzinfo)) - started).total_seconds())
