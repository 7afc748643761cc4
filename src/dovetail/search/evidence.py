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

from dovetail.search.processes import Attempt

_PROBE = ".access-time"


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


def sentence_about_metric(metric: str, reported: Mapping[str, Set[str]]) -> str:
    """Return what is wrong with a trial that has reported other metrics than the searcher's, and what to do."""
    elsewhere = sorted(group for group, names in reported.items() if metric in names and group != "validation")
    if elsewhere:
        found = f"it reported {metric!r} in the group {elsewhere[0]!r} only"
    elif names := reported.get("validation"):
        found = f"its validation reported {', '.join(sorted(names))}"
    else:
        found = "it reported no validation metrics"
    return (
        f"it never reported the searcher's metric {metric!r} ({found}): report it by "
        f"context.train.report_validation_metrics(batches, {{{metric!r}: value}}) of dovetail.core, or return it from "
        "evaluate_batch of a PyTorchTrial"
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
