"""Failures of trials: the last lines of their logs, and their progress."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dovetail.search.checkpoints import checkpoints_of

_LOG = "log.txt"
# Maximal number of lines (notes) after the line with the error.
_NOTES = 20


def log_size(trial: Path) -> int:
    """Return the size of a trial's log in bytes, which is where the output of the next attempt starts."""
    with suppress(FileNotFoundError):
        return (trial / _LOG).stat().st_size
    return 0


def append_to_log(trial: Path, sentence: str) -> None:
    """Append a sentence of this library to the log of a trial, to which its processes write, too."""
    with suppress(OSError), open(trial / _LOG, "ab", buffering=0) as log:
        log.write(f"dovetail: {sentence}\n".encode("utf-8", errors="backslashreplace"))


def last_message(trial: Path, begin: int) -> str:
    r"""Return the last message of an attempt in one line: for an error its type and message.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "log.txt").write_text("Traceback (most recent call last):\n  …\nKeyError: 'lr'\na note\n")
        >>> last_message(folder, 0)
        "KeyError: 'lr'"
    """
    with suppress(OSError), open(trial / _LOG, "rb") as log:
        # Only the output of this attempt, and at most its end: a log may have gigabytes.
        log.seek(max(begin, os.fstat(log.fileno()).st_size - 20_000))
        lines = [line.rstrip() for line in log.read().decode("utf-8", errors="replace").split("\n") if line.strip()]
        return (_error_line(lines) or next(reversed(lines), "")).strip()[:300]
    return ""


def newest_checkpoint(trial: Path) -> int | str | None:
    """Return the number of batches at which the newest checkpoint of a trial was written, or else its name."""
    newest = next(reversed(checkpoints_of(trial)), None)
    return None if newest is None else newest.path.name if newest.steps is None else newest.steps


def _error_line(lines: Sequence[str]) -> str | None:
    """Return the line with the error of the last traceback: the first line after it that is not indented.

    Notes may follow this line. If more lines follow, the program continued after the error.
    """
    begun = [place for place, line in enumerate(lines) if line == "Traceback (most recent call last):"]
    after = range(begun[-1] + 1, len(lines)) if begun else range(0)
    found = next((place for place in after if not lines[place].startswith(" ")), None)
    return None if found is None or len(lines) - found > _NOTES else lines[found]
