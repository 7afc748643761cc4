"""Whether somebody wants this process to leave."""

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
    """Who of several processes knows whether to leave."""

    ChiefOnly = "CHIEF_ONLY"
    """Only the chief asks; how the others learn of it is the script's matter."""
    WorkersAskChief = "WORKERS_ASK_CHIEF"
    """All ask at the same places, and get the chief's answer: they agree."""
    WorkersAskMaster = "WORKERS_ASK_MASTER"
    """Each process answers for itself: they may differ."""


class PreemptContext:
    """Hears SIGTERM and Ctrl-C, and tells the script when it asks.

    The first signal makes `should_preempt` true from then on; the second one acts as if nobody were listening. Only in
    the main thread, and only in place of Python's own handlers: those of the user stay.

    Args:
        distributed: The processes of the run.
        mode: Who of them knows.

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
        """The signal that this process has heard, or None."""

    def __enter__(self) -> PreemptContext:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Listen."""
        self._handler.start()

    def close(self) -> None:
        """Listen no longer; every handler is what it was."""
        self._handler.close()

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether to save and leave.

        With `WorkersAskChief` this is a message: all processes must ask equally often, and get the same answer.

        Args:
            auto_ack: Whether an answer of True is taken for granted: an experiment then knows that the script leaves to
                go on later. Without it, `acknowledge_preemption_signal` says so.

        Raises:
            ConfigError: Asked by another process than the chief, where only the chief may.
        """
        heard = self.signal is not None
        if self._mode is PreemptMode.WorkersAskChief:
            heard = bool(self._distributed.broadcast(heard))
        elif self._mode is PreemptMode.ChiefOnly and not self._distributed.is_chief:
            raise ConfigError(
                f"should_preempt() was called in rank {self._distributed.rank}: with PreemptMode.ChiefOnly only rank 0 "
                "asks; PreemptMode.WorkersAskChief is for all"
            )
        if heard and auto_ack:
            self.acknowledge_preemption_signal()
        return heard

    def acknowledge_preemption_signal(self) -> None:
        """Tell an experiment, if this is a trial of one, that the script leaves because it was asked to."""
        folder = os.environ.get(ATTEMPT)
        if folder is not None and self._distributed.is_chief:
            with suppress(OSError):
                Path(folder, PREEMPTED).touch()

    def _receive(self, number: int) -> None:
        self.signal = number
        self.close()
        announce(number, ": the script is asked to leave when it looks (again to leave at once)")
