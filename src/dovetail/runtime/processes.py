"""Exit of worker processes: together with their parent, and described for messages."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

# From `linux/prctl.h`.
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int) -> Callable[[], None]:
    """Return a function that makes the kernel end a new process when its parent ends, even if it is busy.

    It works on Linux only. The process ends when the thread ends that started it. The function can be the `preexec_fn`
    of a `Popen`: it loads nothing after the fork.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def run() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number)
        # The parent may have ended before this call.
        if os.getppid() != parent:
            os._exit(1)

    return run


def describe_exit(exit_code: int | None) -> str:
    """Return the second half of a sentence about how a process ended.

    Args:
        exit_code: Negative for a signal, as in `subprocess` and `multiprocessing`; or 128 + signal, as in shells and
            `Interrupted`.

    Example:
        >>> describe_exit(-15), describe_exit(3)
        ('was ended by SIGTERM', 'ended with exit code 3')
    """
    if exit_code is not None:
        with suppress(ValueError):
            name = signal.Signals(-exit_code if exit_code < 0 else exit_code - 128).name
            return f"was ended by {name}{' (the system does so when memory is short)' if name == 'SIGKILL' else ''}"
    return f"ended with exit code {exit_code}"
