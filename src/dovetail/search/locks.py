"""File locks that are released when their process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dovetail.search.records import ExperimentError

# Seconds: longer than `is_taken` holds a lock.
_PATIENCE = 2.0


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock on a file, and write the id of this process to it, for the duration of the block.

    Raises:
        ExperimentError: Another process holds the lock.
    """
    with open(path, "a+") as lock:
        deadline = time.monotonic() + _PATIENCE
        while not _locked(lock.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                lock.seek(0)
                raise ExperimentError(f"{what} is already run by process {lock.read().strip() or 'unknown'}")
            time.sleep(0.02)
        # The file is never removed: otherwise one process could lock the removed file, and another one the new file.
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def is_taken(path: Path) -> bool:
    """Return whether a process holds a lock."""
    with suppress(FileNotFoundError), open(path, opener=_without_waiting) as lock:
        return not _locked(lock.fileno(), fcntl.LOCK_SH)
    return False


def _without_waiting(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a FIFO of that name would block.
    return os.open(path, flags | os.O_NONBLOCK)


def _locked(descriptor: int, kind: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    return False
