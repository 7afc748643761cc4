"""Preemption: exit requests by SIGTERM, Ctrl-C or the chief process, which a script polls."""

from __future__ import annotations

import enum
import os
from contextlib import suppress
from pathlib import Path

from dovetail.core.distributed import DistributedContext
from dovetail.errors import ConfigError
from dovetail.info import ATTEMPT, PREEMPTED
from dovetail.runtime.signals import SignalHandler, announce


class PreemptMode(enum.Enum):
    """Which processes of a run are notified when they should exit."""

    ChiefOnly = "CHIEF_ONLY"
    """Only the chief may call `should_preempt`; the script itself informs the others."""
    WorkersAskChief = "WORKERS_ASK_CHIEF"
    """All processes call `should_preempt` at the same places and get the chief's result, so they agree."""
    WorkersAskMaster = "WORKERS_ASK_MASTER"
    """Each process returns its own result: processes may disagree."""


class PreemptContext:
    """Receives SIGTERM and Ctrl-C, and reports them when the script polls `should_preempt`.

    After the first signal `should_preempt` returns True; a second signal has its usual effect. Handlers are installed
    in the main thread only, and replace only Python's own handlers: handlers of the user are unchanged.

    Args:
        distributed: The processes of the run.
        mode: Which processes are notified of a signal.

    Example:
        >>> with PreemptContext(DistributedContext()) as preempt:
        ...     preempt.should_preempt()
        False
    """

    def __init__(self, distributed: DistributedContext, mode: PreemptMode = PreemptMode.WorkersAskChief) -> None:
        self._distributed = distributed
        self._mode = PreemptMode(mode)
        self._handler = SignalHandler(self._receive)
        self.signal: int | None = None
        """The signal that this process has received, or None."""

    def __enter__(self) -> PreemptContext:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Install the handlers."""
        self._handler.start()

    def close(self) -> None:
        """Restore the previous handlers."""
        self._handler.close()

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether to save and exit.

        With `WorkersAskChief` this is a collective call: all processes must make it equally often.

        Args:
            auto_ack: Whether a result of True is acknowledged at once, so that the experiment resumes the script
                later. Otherwise the script calls `acknowledge_preemption_signal`.

        Raises:
            ConfigError: Called by another process than the chief in the mode `ChiefOnly`.
        """
        is_requested = self.signal is not None
        if self._mode is PreemptMode.WorkersAskChief:
            # Signals reach processes at different times; with the chief's value all exit at the same step.
            is_requested = bool(self._distributed.broadcast(is_requested))
        elif self._mode is PreemptMode.ChiefOnly and not self._distributed.is_chief:
            raise ConfigError(
                f"should_preempt() was called in rank {self._distributed.rank}: with PreemptMode.ChiefOnly only rank 0 "
                "may call it; PreemptMode.WorkersAskChief is for all processes"
            )
        if is_requested and auto_ack:
            self.acknowledge_preemption_signal()
        return is_requested

    def acknowledge_preemption_signal(self) -> None:
        """Record for the experiment, if there is one, that the script exits because of an exit request."""
        folder = os.environ.get(ATTEMPT)
        if folder is not None and self._distributed.is_chief:
            # A full disk must not keep the script from saving and exiting.
            with suppress(OSError):
                Path(folder, PREEMPTED).touch()

    def _receive(self, number: int) -> None:
        self.signal = number
        self.close()
        announce(number, ": exit requested; the script stops at its next check (press again to stop at once)")
