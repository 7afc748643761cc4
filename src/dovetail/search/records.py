"""Records of experiments, trials and jobs, as read from the store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    """An experiment, trial or job does not exist, or is in the wrong state for a command."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial.

    Attributes:
        id: Its number for people: commands, reports, logs and the name of its folder use it. It is unique in the store,
            and `get_cluster_info().trial_id` returns it in the trial.
        number: Its index in the experiment, from 0, for searchers; Optuna's tools show it.
        experiment_id: The number of its experiment.
        state: `STOPPED` means that the searcher ended it early, `WAITING` that it will be resumed.
        hparams: Its hyperparameters, nested as in the file.
        directory: Its folder: `info.json`, `log.txt`, `metrics.jsonl`, checkpoints.
        best: The best value of the searcher's metric.
        best_at: The number of batches at the best value.
        latest: The last value.
        steps: The number of batches in the last report.
        progress: The completed fraction of its work, from 0 to 1, if it was reported.
        status: The last text given to `set_status`, cut to 200 characters; None if there is none.
        restarts: How often it was restarted after a failure.
        started: When it was first started.
        ended: When it ended.
        reason: Why it ended in this state, for display.
        source: The index of the trial whose checkpoint it started from, if any.
        values: The values of the metric by number of batches, in order.
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
        name: The name in the file, or the name of the file.
        state: Its current or final state.
        config: The configuration with the changes of the command line, without secrets.
        directory: Its folder: `config.yaml`, `code`, `runner.log`, `trials`.
        created: When it was created.
        ended: When it ended.
        reason: Why it ended in this state, for display.
        is_running: Whether a runner runs it now.
        trials: Its trials, oldest first.
        warnings: Sentences about problems that make the search less effective, for display.
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
        """Whether smaller values of the metric are better."""
        return bool(self.config["searcher"].get("smaller_is_better", True))

    def trial(self, trial_id: int) -> TrialRecord:
        """Return one of its trials.

        Raises:
            ExperimentError: It has no trial with this number.
        """
        by_id = {trial.id: trial for trial in self.trials}
        if trial_id not in by_id:
            raise no_such("trial", trial_id, list(by_id), f"experiment {self.id} has no")
        return by_id[trial_id]

    def source_id(self, trial: TrialRecord) -> int | None:
        """Return the id of the trial whose checkpoint a trial started from, if any."""
        return next((each.id for each in self.trials if each.number == trial.source), None)

    @property
    def best_trial(self) -> TrialRecord | None:
        """The trial with the best value, the first one if several are equal; None if no trial has a value."""
        sign = 1 if self.smaller_is_better else -1
        # A value that differs from itself is NaN, which `min` could return as the best.
        measured = [trial for trial in self.trials if trial.best is not None and trial.best == trial.best]
        return min(measured, key=lambda trial: sign * (trial.best or 0.0), default=None)


@dataclass(frozen=True)
class JobRecord:
    """A script that was run as a job.

    Attributes:
        id: Its number.
        name: The name in the file, or the name of the file.
        state: `UNKNOWN` means a job on a cluster whose `run_job` was killed.
        directory: Its folder: `info.json`, `log.txt`, `code`.
        exit_code: The exit code of the script, once it has ended.
        started: When it started.
        ended: When it ended.
    """

    id: int
    name: str
    state: Literal["RUNNING", "COMPLETED", "ERROR", "CANCELED", "UNKNOWN"]
    directory: Path
    exit_code: int | None = None
    started: datetime | None = None
    ended: datetime | None = None


def best_step(values: Mapping[int, float], smaller_is_better: bool) -> int | None:
    """Return the number of batches at the best value, the first if several are equal; None if there is no number."""
    sign = 1 if smaller_is_better else -1
    # Comparisons with NaN are always False, so the result would depend on the order.
    numbers = {step: value for step, value in values.items() if not math.isnan(value)}
    return min(numbers, key=lambda step: (sign * numbers[step], step), default=None)


def no_such(what: str, number: int, known: Sequence[int], lacks: str = "there is no") -> ExperimentError:
    """Return the error about an unknown number; it lists the known ones.

    Example:
        >>> print(no_such("trial", 0, [3, 4, 5]))
        there is no trial 0: there are trials 3 to 5
    """
    ranges: list[list[int]] = []
    for each in sorted(known):
        if ranges and each == ranges[-1][-1] + 1:
            ranges[-1][1:] = [each]
        else:
            ranges.append([each])
    there = ", ".join(" to ".join(map(str, each)) for each in ranges)
    words = {0: "there is none", 1: f"there is {what} {there}"}.get(len(known), f"there are {what}s {there}")
    return ExperimentError(f"{lacks} {what} {number}: {words}")
