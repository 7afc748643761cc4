"""Checkpoints of trials: finding the newest one, and removing surplus ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dovetail.checkpoint import TrialCheckpoint, experiment_retention, verify
from dovetail.checkpoint.files import DISK, discard, is_temporary
from dovetail.checkpoint.store import remove, scan
from dovetail.checkpoint.stored_files import is_stored_files, read_stored_files, verify_stored_files
from dovetail.errors import CheckpointError


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of a trial.

    Attributes:
        path: Its folder.
        steps: The number of batches at which it was written, if known.
        is_files: Whether a script stored it with `core.checkpoint`; such a script refers to it by its name.
    """

    path: Path
    steps: int | None
    is_files: bool = False

    @property
    def reference(self) -> str:
        """The text with which a trial resumes from it: a name or a path."""
        return self.path.name if self.is_files else str(self.path)


def checkpoints_of(trial: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints in the folder of a trial, oldest first; unreadable ones are left out."""
    infos, _ = scan(trial)
    return [*_stored_files(trial), *(StoredCheckpoint(info.path, info.step) for info in infos)]


def latest_checkpoint(trial: Path) -> StoredCheckpoint | None:
    """Return the newest intact checkpoint in the folder of a trial, or None."""
    return next(filter(_is_intact, reversed(checkpoints_of(trial))), None)


def remove_surplus(
    trials: Mapping[Path, Mapping[int, float]],
    ended: Sequence[Path],
    *,
    experiment_best: int,
    trial_best: int,
    trial_latest: int,
    smaller_is_better: bool,
) -> list[Path]:
    """Remove the checkpoints of trials that no rule keeps, and return their folders.

    `trials` has the folders of all trials with their metric by batches; checkpoints are removed only from trials in
    `ended`. The numbers are how many checkpoints each rule keeps. Damaged checkpoints are not counted and not removed.
    """
    # If a trial's folder were a link, files outside of the experiment could be removed.
    own = [trial for trial in trials if not trial.is_symlink()]
    found = {checkpoint.path: (trial, checkpoint) for trial in own for checkpoint in checkpoints_of(trial)}
    measured = [
        TrialCheckpoint(path, trial, trials[trial].get(-1 if checkpoint.steps is None else checkpoint.steps))
        for path, (trial, checkpoint) in found.items()
    ]
    damaged: set[Path] = set()
    intact: set[Path] = set()
    # A damaged checkpoint does not count for a rule, so another one is kept in its place, which must be verified,
    # too.
    while True:
        candidates = [each for each in measured if each.id not in damaged]
        kept = experiment_retention(candidates, experiment_best, trial_best, trial_latest, smaller_is_better)
        # A running trial may write and remove checkpoints itself, so nothing of it is removed here.
        lost = [path for path, (trial, _) in found.items() if trial in ended and path not in kept | damaged]
        # Verify the checkpoints that are kept before removing others.
        losing = {found[path][0] for path in lost}
        unseen = [path for path in found if path in kept and path not in intact and found[path][0] in losing]
        if not unseen:
            break
        for path in unseen:
            (intact if _is_intact(found[path][1]) else damaged).add(path)
    for path in lost:
        if found[path][1].is_files:
            discard(DISK, path)
        else:
            remove(path)
    return lost


def _is_intact(checkpoint: StoredCheckpoint) -> bool:
    with suppress(CheckpointError, OSError):
        if checkpoint.is_files:
            verify_stored_files(checkpoint.path)
        else:
            verify(checkpoint.path)
        return True
    return False


def _stored_files(trial: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints that a script stored with `core.checkpoint`, oldest first."""
    found = []
    for name in sorted(os.listdir(trial)) if trial.is_dir() else []:
        place = trial / name
        if is_temporary(name) or not is_stored_files(place):
            continue
        # Another kind of checkpoint, a damaged one, or a file of another program with the same name.
        with suppress(CheckpointError, OSError):
            content = read_stored_files(place)
            steps = content.metadata.get("steps_completed")
            found.append((content.created, place, steps if isinstance(steps, int) else None))
    return [StoredCheckpoint(path, steps, is_files=True) for _, path, steps in sorted(found, key=lambda it: it[:2])]
