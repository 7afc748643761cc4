"""Handlers of Ctrl-C and SIGTERM, and the error that ends an interrupted run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

__all__ = ["Interrupted", "Stoppable", "heeding_signals", "listening"]


class Interrupted(KeyboardInterrupt, SystemExit):
    """Training was ended by a signal, after the running update and with a checkpoint where there is a place for one.

    Left alone it ends the program with the exit code 128 + signal (130 for Ctrl-C, 143 for SIGTERM) and no traceback.

    Args:
        number: The signal.
        at_once: Whether it was the second one, so that training broke off where it was and nothing was saved.
    """

    def __init__(self, number: int, *, at_once: bool = False) -> None:
        super().__init__(128 + number)
        self.code = 128 + number
        self.number = number
        self.at_once = at_once


class Stoppable(Protocol):
    """A run that a signal can stop."""

    def stop(self, reason: str, signal: int | None = None) -> None:
        """Request the end of the run after the running update."""


_DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class _Listener:
    """Tells the run of the moment of a signal; between runs, signals do what they do where nobody listens."""

    def __init__(self) -> None:
        self.context: Stoppable | None = None
        self.heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.context is None:
            signal.signal(number, _DEFAULTS[number])
            signal.raise_signal(number)
        elif self.heard:
            _say(f"\n{name} again: leaving at once")
            raise Interrupted(number, at_once=True)
        else:
            self.heard = True
            self.context.stop(f"interrupted by {name}", number)
            _say(f"\n{name}: finishing the running update, then leaving (again to leave at once)")


_listener: _Listener | None = None


@contextmanager
def listening() -> Iterator[_Listener | None]:
    """Put handlers in place for all runs inside: to do so for each costs more than a client needs for a small batch.

    Handlers of the user's own are left in place, and so are all outside of the main thread, where there are none.
    """
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    if _listener is not None:
        yield _listener
        return
    _listener = _Listener()
    replaced = [number for number, handler in _DEFAULTS.items() if signal.getsignal(number) == handler]
    for number in replaced:
        signal.signal(number, _listener)
    try:
        yield _listener
    finally:
        _listener = None
        for number in replaced:
            signal.signal(number, _DEFAULTS[number])


@contextmanager
def heeding_signals(context: Stoppable) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a stop of the run, and the second into its immediate end."""
    with listening() as listener:
        if listener is None or listener.context is not None:
            # Of a run inside another one, the outer hears.
            yield
            return
        listener.context, listener.heard = context, False
        try:
            yield
        finally:
            listener.context = None


def _say(sentence: str) -> None:
    # Not print: the signal may have come while the program was writing to the same stream.
    with suppress(OSError):
        os.write(2, f"{sentence}\n".encode())
