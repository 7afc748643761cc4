"""Evidence that a trial has read its hyperparameters and has reported the metric that the searcher needs.

A script may read its hyperparameters with this library, which records it in the folder of the attempt. It may also read
the file in `DOVETAIL_TRIAL` directly, as a shell script does. This changes the access time of the file: the runner sets
it to 0 before the trial starts, and this library reads the file without changing it.
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
# Numbers in reports that are not metrics.
_TIMES = ("batches", "epochs", "records")
_REPORTED_BY = (
    "context.train.report_validation_metrics(batches, {{{metric!r}: value}}) of dovetail.core, or return it from "
    "evaluate_batch of a PyTorchTrial"
)


def reset_access_time(path: Path) -> None:
    """Set the access time of a file to 0, so that the next read can be detected."""
    with suppress(OSError):
        os.utime(path, ns=(0, path.stat().st_mtime_ns))


def has_read_hparams(trial: Path, info: Path) -> bool:
    """Return whether a trial has read its hyperparameters from the file `info`; True if this cannot be detected."""
    if any(attempt.has_read_hparams for attempt in Attempt.all_of(trial)):
        return True
    # The probe comes last because it writes a file.
    return _was_read(info) or not _shows_reads(trial)


def sentence_about_hparams(names: Set[str]) -> str:
    """Return a sentence about a trial that has not read the hyperparameters in `names`, and what to do."""
    return (
        f"it read no hyperparameter, so the searcher's choice of {', '.join(sorted(names))} had no effect: read them "
        "with dovetail.get_cluster_info().hparams, or with context.get_hparam(name) in a trial"
    )


def first_metric(metrics: Mapping[str, Any]) -> str:
    """Return the first numeric metric of a report, for experiments without a metric; empty if there is none.

    Example:
        >>> first_metric({"epochs": 3, "matrix": [1, 2], "loss": 0.5, "accuracy": 0.9})
        'loss'
    """
    return next((name for name in metrics if name not in _TIMES and number(metrics, name) is not None), "")


def sentence_about_time(metric: str, searcher: SearcherConfig) -> str:
    """Return a sentence about trials that report a metric without the time at which the searcher compares them."""
    named = f"report_validation_metrics(batches, {{{metric!r}: …, {searcher.time_metric!r}: …}})"
    return (
        f"trials report {metric!r} without a number {searcher.time_metric!r}, by which the searcher "
        f"{searcher.name} compares them, so that none of them is stopped early: report it with the metric, by {named}, "
        "or give searcher.max_length in batches"
    )


def sentence_about_metric(metric: str, reported: Mapping[str, Set[str]]) -> str:
    """Return a sentence about a trial that has not reported the searcher's metric, and what to do.

    Args:
        metric: The searcher's metric; empty if any metric is enough.
        reported: The names of the reported metrics, by group.
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
    """Return whether the file system of a folder records access times, which a mount option can disable."""
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
