"""Evidence that a trial has used what the searcher chose for it and has reported what the searcher needs.

A script may read its hyperparameters by this library, which records it in the folder of the attempt. It may also read
the file that `DOVETAIL_TRIAL` names by itself, as a shell script does. Then the access time of that file changes: the
runner sets it to 0 before the trial starts, and this library reads the file without changing it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.search.processes import Attempt
from dovetail.search.reports import number

if TYPE_CHECKING:
    from dovetail.search.searchers.base import SearcherConfig

_PROBE = ".access-time"
# What reports have besides metrics.
_TIMES = ("batches", "epochs", "records")
_REPORTED_BY = (
    "context.train.report_validation_metrics(batches, {{{metric!r}: value}}) of dovetail.core, or return it from "
    "evaluate_batch of a PyTorchTrial"
)


def reset_access_time(path: Path) -> None:
    """Set the access time of a file to 0, so that the next read of it can be seen."""
    with suppress(OSError):
        os.utime(path, ns=(0, path.stat().st_mtime_ns))


def has_read_hparams(trial: Path, info: Path) -> bool:
    """Whether a trial has read its hyperparameters, which the file `info` has; True if that cannot be known."""
    if any(attempt.has_read_hparams for attempt in Attempt.all_of(trial)):
        return True
    return _was_read(info) or not _shows_reads(trial)


def sentence_about_hparams(names: Set[str]) -> str:
    """Return what is wrong with a trial that has not read the hyperparameters of some names, and what to do."""
    return (
        f"it read no hyperparameter, so the searcher's choice of {', '.join(sorted(names))} had no effect: read them "
        "by dovetail.get_cluster_info().hparams, or by context.get_hparam(name) in a trial"
    )


def first_metric(metrics: Mapping[str, Any]) -> str:
    """Return the first metric of a report that is a number, for experiments that name none; empty if there is none.

    Example:
        >>> first_metric({"epochs": 3, "matrix": [1, 2], "loss": 0.5, "accuracy": 0.9})
        'loss'
    """
    return next((name for name in metrics if name not in _TIMES and number(metrics, name) is not None), "")


def sentence_about_time(metric: str, searcher: SearcherConfig) -> str:
    """Return what is wrong with trials that report a metric without the time at which the searcher compares them."""
    named = f"report_validation_metrics(batches, {{{metric!r}: …, {searcher.time_metric!r}: …}})"
    return (
        f"trials report {metric!r} without a number {searcher.time_metric!r}, by which the searcher "
        f"{searcher.name} compares them, so that none of them is stopped early: report it with the metric, by {named}, "
        "or give searcher.max_length in batches"
    )


def sentence_about_metric(metric: str, reported: Mapping[str, Set[str]]) -> str:
    """Return what is wrong with a trial that has reported other metrics than the searcher's, and what to do.

    Args:
        metric: The searcher's metric; empty if any would do.
        reported: The names of what the trial has reported, by group.
    """
    if not metric:
        return f"it reported no validation metric: report one by {_REPORTED_BY.format(metric='loss')}"
    elsewhere = sorted(group for group, names in reported.items() if metric in names and group != "validation")
    if elsewhere:
        found = f"it reported {metric!r} in the group {elsewhere[0]!r} only"
    elif names := reported.get("validation"):
        found = f"its validation reported {', '.join(sorted(names))}"
    else:
        found = "it reported no validation metrics"
    return (
        f"it never reported the searcher's metric {metric!r} ({found}): report it by "
        f"{_REPORTED_BY.format(metric=metric)}"
    )


def _was_read(path: Path) -> bool:
    try:
        return path.stat().st_atime_ns != 0
    except OSError:
        return True


def _shows_reads(folder: Path) -> bool:
    """Whether the file system of a folder records access times; an option of a mount can turn that off."""
    probe = folder / _PROBE
    try:
        probe.write_bytes(b"probe")
        reset_access_time(probe)
        before = probe.stat().st_atime_ns
        probe.read_bytes()
        return before == 0 and _was_read(probe)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
