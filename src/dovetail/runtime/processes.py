"""End of a worker process: with its parent, and in words."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int) -> Callable[[], None]:
    """Return a function that a new process calls so that the kernel ends it with its parent, even if it is busy.

    The kernel does so on Linux only, and when the thread ends that has started the process. The function can be the
    `preexec_fn` of a `Popen`: everything is loaded before the fork.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def run() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number)
        # The parent may have died before.
        if os.getppid() != parent:
            os._exit(1)

    return run


def describe_exit(exit_code: int | None) -> str:
    """Return how a process ended, for the end of a sentence.

    Args:
        exit_code: Negative for a signal, as `subprocess` and `multiprocessing` have it; or 128 + signal, as shells and
            `Interrupted` have it.

    Example:
        >>> describe_exit(-15), describe_exit(3)
        ('was ended by SIGTERM', 'ended with exit code 3')
    """
    if exit_code is not None:
        with suppress(ValueError):
            name = signal.Signals(-exit_code if exit_code < 0 else exit_code - 128).name
            return f"was ended by {name}{' (the system does so when memory is short)' if name == 'SIGKILL' else ''}"
    return f"ended with exit code {exit_code}"
