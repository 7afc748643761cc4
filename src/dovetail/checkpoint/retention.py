"""Rules for which checkpoints are kept."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from dovetail.checkpoint.files import DISK, Files
from dovetail.checkpoint.manifest import CheckpointInfo
from dovetail.checkpoint.store import is_unchanged, list_checkpoints, remove
from dovetail.errors import ConfigError, UnknownNameError

_Item = TypeVar("_Item")


def retain(
    infos: Sequence[CheckpointInfo],
    *,
    last: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] = "min",
    every: int | None = None,
) -> set[Path]:
    """Return the paths of the checkpoints that at least one rule keeps.

    Args:
        infos: The checkpoints, oldest first, as `list_checkpoints` returns them.
        last: Keep this number of the newest.
        best: Keep this number of the best by `metric`. Of equal ones the older is better; a checkpoint without the
            metric, or with NaN, is never among the best.
        metric: A name under `"metrics"` in the summaries.
        mode: Whether the smallest or the largest value is best.
        every: Keep each checkpoint whose step is a multiple of this.

    Raises:
        ConfigError: No rule is given, or a rule is invalid.
    """
    if last is None and best is None and every is None:
        raise ConfigError("retention: expected at least one of last, best and every")
    if mode not in ("min", "max"):
        raise ConfigError(f"mode: expected 'min' or 'max', got {mode!r}")
    if best is not None and metric is None:
        raise ConfigError("best: expected also the metric by which checkpoints are compared")
    if best is None and metric is not None:
        raise ConfigError(f"metric: {metric!r} has no effect without best, the number of checkpoints to keep by it")
    for name, count, least in (("last", last, 0), ("best", best, 0), ("every", every, 1)):
        if count is not None and count < least:
            raise ConfigError(f"{name}: expected a number of at least {least}, got {count}")
    kept = list(_tail(infos, last or 0))
    if best is not None and metric is not None:
        sign = 1 if mode == "min" else -1
        measured = [info for info in infos if metric in info.metrics]
        # The sort is stable, so the older of two equal checkpoints comes first.
        kept += sorted(measured, key=lambda info: sign * info.metrics[metric])[:best]
    if every is not None:
        kept += [info for info in infos if info.step is not None and info.step % every == 0]
    return {info.path for info in kept}


def prune(
    directory: str | os.PathLike[str],
    *,
    last: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] = "min",
    every: int | None = None,
    pattern: str = "*",
    dry_run: bool = False,
    files: Files = DISK,
) -> list[Path]:
    """Remove the checkpoints in `directory` that no rule keeps, and return their paths.

    Other processes may write and remove checkpoints in the folder at the same time. A checkpoint that another process
    removes first, or replaces after it was listed, is not removed here.

    The rules of `retain` apply to checkpoints whose name matches `pattern` (`*` and `?`); others are kept. The newest
    checkpoint is always kept, so that a run can be resumed. Damaged ones give a warning and are kept. With `dry_run`
    nothing is removed.

    Raises:
        UnknownNameError: No checkpoint has the metric, so none would be kept as the best; nothing is removed.
        ConfigError: See `retain`.
    """
    infos = [info for info in list_checkpoints(directory) if fnmatch.fnmatchcase(info.path.name, pattern)]
    kept = retain(infos, last=last, best=best, metric=metric, mode=mode, every=every)
    known = {str(name) for info in infos for name in _metric_names(info)}
    if metric is not None and infos and metric not in known:
        raise UnknownNameError("metric", metric, known)
    # Without the newest one, from which a run can resume.
    surplus = [info for info in infos[:-1] if info.path not in kept]
    # Another process may have replaced a checkpoint since it was listed.
    return [info.path for info in surplus if dry_run or (is_unchanged(info) and remove(info.path, files))]


@dataclass(frozen=True, slots=True)
class TrialCheckpoint:
    """A checkpoint of one trial of an experiment, and its validation metric if it was validated.

    Example:
        >>> checkpoints = [TrialCheckpoint("a", trial=1, metric=0.5), TrialCheckpoint("b", trial=1)]
        >>> sorted(experiment_retention(checkpoints, experiment_best=0, trial_best=1, trial_latest=1))
        ['a', 'b']
    """

    id: Hashable
    trial: Hashable
    metric: float | None = None


def experiment_retention(
    checkpoints: Sequence[TrialCheckpoint],
    experiment_best: int,
    trial_best: int,
    trial_latest: int,
    smaller_is_better: bool = True,
) -> set[Hashable]:
    """Return the ids of the checkpoints to keep: some of the best ones overall, and of the best and newest per trial.

    The checkpoints of a trial must be in the order in which they were written. A checkpoint without a metric, or with
    NaN, is never among the best.
    """
    trials: dict[Hashable, list[TrialCheckpoint]] = {}
    for checkpoint in checkpoints:
        trials.setdefault(checkpoint.trial, []).append(checkpoint)

    def best(candidates: Iterable[TrialCheckpoint], count: int) -> list[TrialCheckpoint]:
        # NaN is not equal to itself.
        measured = [(c.metric, c) for c in candidates if c.metric is not None and c.metric == c.metric]
        ordered = sorted(measured, key=lambda pair: pair[0] if smaller_is_better else -pair[0])
        return [checkpoint for _, checkpoint in ordered[:count]]

    kept = chain(
        best(checkpoints, experiment_best),
        *(best(of_trial, trial_best) for of_trial in trials.values()),
        *(_tail(of_trial, trial_latest) for of_trial in trials.values()),
    )
    return {checkpoint.id for checkpoint in kept}


def _metric_names(info: CheckpointInfo) -> Iterable[Any]:
    metrics = info.summary.get("metrics")
    # A metric that is NaN in all checkpoints is known, too.
    return metrics if isinstance(metrics, Mapping) else ()


def _tail(items: Sequence[_Item], count: int) -> Sequence[_Item]:
    return items[max(0, len(items) - count) :]
