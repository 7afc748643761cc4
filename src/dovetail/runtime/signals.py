"""Handlers of Ctrl-C and SIGTERM, and the error that ends an interrupted run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

# Python's own handlers. A handler that differs was set by the user.
_DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupted(KeyboardInterrupt, SystemExit):
    """Raised when a signal ends training, after the current update and a checkpoint, if the run has a place for one.

    If it is not caught, the program exits with the code 128 + signal (130 for Ctrl-C, 143 for SIGTERM), no traceback.

    Args:
        number: The signal.
        at_once: Whether it was the second signal, so that training stopped immediately and nothing was saved.
    """

    def __init__(self, number: int, *, at_once: bool = False) -> None:
        # As a SystemExit it ends Python with this code and no traceback. As a KeyboardInterrupt it is caught by code
        # that expects Ctrl-C.
        super().__init__(128 + number)
        self.code = 128 + number
        self.number = number
        self.at_once = at_once


class SignalHandler:
    """Calls a function for every SIGINT and SIGTERM, from `start` until `close` restores the previous handlers.

    Python allows handlers in the main thread only; in other threads this class does nothing.

    Args:
        receive: Called with the number of the signal. It may call `close`, so that a second signal acts as before.
        replaces_all: Whether to replace also handlers that the user has set; otherwise only Python's own.

    Example:
        >>> received = []
        >>> with SignalHandler(received.append, replaces_all=True):
        ...     signal.raise_signal(signal.SIGTERM)
        >>> received == [signal.SIGTERM]
        True
    """

    def __init__(self, receive: Callable[[int], object], *, replaces_all: bool = False) -> None:
        self._receive = receive
        self._replaces_all = replaces_all
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalHandler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Replace the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, default in _DEFAULTS.items():
            previous = signal.getsignal(number)
            if self._replaces_all or previous == default:
                self._previous[number] = previous
                signal.signal(number, self._handle)

    def close(self) -> None:
        """Restore the handlers that `start` has replaced."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._receive(number)


def announce(number: int, sentence: str) -> None:
    """Write a line about a signal to the terminal, from inside of a handler."""
    # Not `print`: the signal may arrive while the program writes to the same stream.
    with suppress(OSError):
        os.write(2, f"\n{signal.Signals(number).name}{sentence}\n".encode())


@contextmanager
def collect_signals(sentences: Sequence[str]) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of ending the process. Only in the main thread.

    Args:
        sentences: Messages for the first signal, the second signal, …; the last one is repeated.
    """
    received: list[int] = []

    def receive(number: int) -> None:
        received.append(number)
        announce(number, f": {sentences[min(len(received), len(sentences)) - 1]}")

    with SignalHandler(receive, replaces_all=True):
        yield received


@contextmanager
def preserved_handlers(*numbers: int) -> Iterator[None]:
    """Restore signal handlers that a library replaces inside of the block. Only in the main thread."""
    previous = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in previous.items():
                signal.signal(number, handler)


def ignore_interrupts() -> None:
    """Ignore SIGINT in a worker process: Ctrl-C reaches all processes of a terminal, and the parent stops workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# ------------------------------------------------------------------ training runs


class Stoppable(Protocol):
    """A run that a signal can stop."""

    def stop(self, reason: str, signal: int | None = None) -> None:
        """Request the end of the run after the current update."""


class _RunSignals:
    """Stops the current run at the first signal, and ends it at once at the second; between runs, acts like Python."""

    def __init__(self) -> None:
        self.run: Stoppable | None = None
        self.is_stopping = False

    def receive(self, number: int) -> None:
        if self.run is None:
            # No run is active: act as if this handler were not installed.
            signal.signal(number, _DEFAULTS[number])
            signal.raise_signal(number)
        elif self.is_stopping:
            announce(number, " again: stopping at once")
            raise Interrupted(number, at_once=True)
        else:
            self.is_stopping = True
            self.run.stop(f"interrupted by {signal.Signals(number).name}", number)
            announce(number, ": finishing the current update (press again to stop at once)")


_run_signals: _RunSignals | None = None


@contextmanager
def install_handlers_once() -> Iterator[_RunSignals | None]:
    """Install the signal handlers once for all runs in the block; doing so per run is slower than a small batch.

    Handlers of the user are unchanged. Outside of the main thread no handler is installed.
    """
    global _run_signals
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    if _run_signals is not None:
        yield _run_signals
        return
    _run_signals = _RunSignals()
    try:
        with SignalHandler(_run_signals.receive):
            yield _run_signals
    finally:
        _run_signals = None


@contextmanager
def stop_on_signals(run: Stoppable) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a stop of the run, and the second into its immediate end."""
    with install_handlers_once() as signals:
        if signals is None or signals.run is not None:
            # A run inside of another run: the signal stops the outer run.
            yield
            return
        signals.run, signals.is_stopping = run, False
        try:
            yield
        finally:
            signals.run = None
