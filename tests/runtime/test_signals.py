from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from dovetail.runtime.signals import SignalHandler, collect_signals, preserved_handlers

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers_of_python() -> Iterator[None]:
    with preserved_handlers(*NUMBERS):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield


def in_place() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


def test_signals_are_collected_and_handlers_are_restored(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with collect_signals(["once", "more"]) as heard:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == [signal.SIGINT] * 3
    assert signal.getsignal(signal.SIGINT) == before
    assert capfd.readouterr().err.split("\n") == ["", "SIGINT: once", "", "SIGINT: more", "", "SIGINT: more", ""]


def test_a_closed_handler_leaves_the_second_signal_to_python() -> None:
    received: list[int] = []

    def receive(number: int) -> None:
        received.append(number)
        handler.close()

    handler = SignalHandler(receive)
    with pytest.raises(KeyboardInterrupt), handler:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM]
    assert in_place() == [signal.default_int_handler, signal.SIG_DFL]


@pytest.mark.parametrize("replaces_all", [False, True])
def test_handlers_of_the_user_are_replaced_only_on_request(replaces_all: bool) -> None:
    received: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append("user"))
    before = in_place()
    with SignalHandler(lambda number: received.append("handler"), replaces_all=replaces_all):
        signal.raise_signal(signal.SIGTERM)
    assert received == ["handler" if replaces_all else "user"]
    assert in_place() == before


def test_another_thread_replaces_no_handler() -> None:
    before, found = in_place(), []

    def work() -> None:
        with SignalHandler(lambda number: None, replaces_all=True), preserved_handlers(*NUMBERS):
            found.append(in_place())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [*found, in_place()] == [before] * 2
