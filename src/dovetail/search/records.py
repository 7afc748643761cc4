"""Records of experiments, trials and jobs, as read from the store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from dovetail.errors import DovetailError

ExperimentState = Literal["ACTIVE", "PAUSED", "COMPLETED", "CANCELED", "ERROR"]
TrialState = Literal["WAITING", "RUNNING", "COMPLETED", "STOPPED", "INVALID_HP", "CANCELED", "ERROR"]

OVER: tuple[ExperimentState, ...] = ("COMPLETED", "CANCELED", "ERROR")
"""The states of an experiment that cannot be resumed."""


class ExperimentError(DovetailError):
    """An experiment, trial or job that is not there, or not in a state to do what is asked."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial.

    Attributes:
        id: Its number in the whole store, for `load_checkpoint_trial(trial_id=…)`.
        number: Its number in the experiment, from 0.
        experiment_id: Whose it is.
        state: `STOPPED` means that the searcher ended it early, `WAITING` that it will be resumed.
        hparams: Its hyperparameters, nested as in the file.
        directory: Its folder: `info.json`, `log.txt`, `metrics.jsonl`, checkpoints.
        best: The best value of the searcher's metric.
        best_at: After how many batches.
        latest: The last value.
        steps: Batches that were reported last.
        progress: How much of its work is done, from 0 to 1, if it has said so.
        status: The last text given to `set_status`, cut to 200 characters; None if it set none.
        restarts: How often it was started again after a failure.
        started: When it was first started.
        ended: When it was over.
        reason: Why it ended as it did, for people.
        source: The trial whose checkpoint it started from, if any.
        values: The metric after so many batches, in order.
    """

    id: int
    number: int
    experiment_id: int
    state: TrialState
    hparams: dict[str, Any]
    directory: Path
    best: float | None = None
    best_at: int | None = None
    latest: float | None = None
    steps: int = 0
    progress: float | None = None
    status: str | None = None
    restarts: int = 0
    started: datetime | None = None
    ended: datetime | None = None
    reason: str | None = None
    source: int | None = None
    values: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ExperimentRecord:
    """One experiment.

    Attributes:
        id: Its number in the store.
        name: As the file has it, or the file's own name.
        state: What became of it.
        config: The configuration, with what the command line has set, and without its secrets.
        directory: Its folder: `config.yaml`, `code`, `runner.log`, `trials`.
        created: When.
        ended: When it was over.
        reason: Why it ended as it did, for people.
        is_running: Whether a runner runs it now.
        trials: Its trials, by number.
        warnings: Sentences about what makes the search less than it should be, for people.
        first_metric: The first number that a validation reported, if the configuration names no metric; else None.
    """

    id: int
    name: str
    state: ExperimentState
    config: dict[str, Any]
    directory: Path
    created: datetime
    ended: datetime | None = None
    reason: str | None = None
    is_running: bool = False
    trials: tuple[TrialRecord, ...] = ()
    warnings: tuple[str, ...] = ()
    first_metric: str | None = None

    @property
    def metric(self) -> str:
        """The metric that trials are compared by; empty if the configuration names none and no trial has reported."""
        return str(self.config["searcher"].get("metric") or self.first_metric or "")

    @property
    def metric_label(self) -> str:
        """The metric for people, marked as the first reported one if the configuration names none."""
        if self.config["searcher"].get("metric"):
            return self.metric
        goal = "smaller" if self.smaller_is_better else "larger"
        return f"{self.metric} (first reported, {goal} is better)" if self.metric else "first reported metric"

    @property
    def smaller_is_better(self) -> bool:
        """Its direction."""
        return bool(self.config["searcher"].get("smaller_is_better", True))

    @property
    def best_trial(self) -> TrialRecord | None:
        """The trial with the best value, the first of several; None where none has one."""
        sign = 1 if self.smaller_is_better else -1
        measured = [trial for trial in self.trials if trial.best is not None and trial.best == trial.best]
        return min(measured, key=lambda trial: sign * (trial.best or 0.0), default=None)


@dataclass(frozen=True)
class JobRecord:
    """A script that was run as a job.

    Attributes:
        id: Its number.
        name: As the file has it, or the file's own name.
        state: `UNKNOWN` means a job on a cluster whose `run_job` was killed.
        directory: Its folder: `info.json`, `log.txt`, `code`.
        exit_code: The exit code of the script, once it has ended.
        started: When.
        ended: When it was over.
    """

    id: int
    name: str
    state: Literal["RUNNING", "COMPLETED", "ERROR", "CANCELED", "UNKNOWN"]
    directory: Path
    exit_code: int | None = None
    started: datetime | None = None
    ended: datetime | None = None


def best_step(values: Mapping[int, float], smaller_is_better: bool) -> int | None:
    """Return where the best value is, the first of several; None where none is a number."""
    sign = 1 if smaller_is_better else -1
    numbers = {step: value for step, value in values.items() if not math.isnan(value)}
    return min(numbers, key=lambda step: (sign * numbers[step], step), default=None)
