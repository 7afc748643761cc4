"""Signals during and between runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from problem import Problem

from dovetail import Epochs
from dovetail.callbacks import Callback
from dovetail.runtime.signals import Interrupted, install_handlers_once
from dovetail.trainers import Trainer
from dovetail.trainers.context import TrainingContext

HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """The handlers of a plain script, whatever the runner of tests has."""
    found = {number: signal.signal(number, handler) for number, handler in HANDLERS.items()}
    yield
    for number, handler in found.items():
        signal.signal(number, handler)


class AtStart(Callback):
    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def on_train_start(self, context: TrainingContext) -> None:
        self.act()


def training(problem: Problem, at_start: Callable[[], object]) -> Trainer:
    return Trainer(problem.model(), verbose=False, callbacks=[AtStart(at_start)])


def in_place() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in HANDLERS}


@pytest.mark.parametrize("number", HANDLERS)
def test_a_signal_ends_one_of_many_runs(number: int, problem: Problem) -> None:
    with install_handlers_once(), pytest.raises(Interrupted) as reported:
        training(problem, lambda: signal.raise_signal(number)).fit(problem.batches, max_length=Epochs(1))
    assert reported.value.number == number
    assert in_place() == HANDLERS


def test_one_of_many_runs_leaves_the_signal_handlers_installed(problem: Problem) -> None:
    found = []
    with install_handlers_once():
        before = in_place()
        for _ in range(2):
            trainer = training(problem, lambda: found.append(in_place()))
            trainer.fit(problem.batches, max_length=Epochs(1))
        assert [before, *found] == [before] * 3
    assert before != HANDLERS
    assert in_place() == HANDLERS


def test_between_runs_ctrl_c_raises_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as reported, install_handlers_once():
        signal.raise_signal(signal.SIGINT)
    assert type(reported.value) is KeyboardInterrupt
    assert in_place() == HANDLERS


def test_between_runs_sigterm_ends_the_process() -> None:
    child = os.fork()
    if child == 0:
        with install_handlers_once():
            signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def test_signal_handlers_of_the_user_are_kept() -> None:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with install_handlers_once():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert received == [signal.SIGTERM]


def test_signals_do_not_stop_a_run_in_another_thread(problem: Problem) -> None:
    trainer = Trainer(problem.model(), verbose=False)
    trained = threading.Thread(target=lambda: trainer.fit(problem.batches, max_length=Epochs(1)))
    listeners = []
    with install_handlers_once() as mine:
        other = threading.Thread(target=lambda: listeners.append(install_handlers_once().__enter__()))
        for thread in (trained, other):
            thread.start()
            thread.join()
    assert trainer.context.progress.epoch == 1
    assert mine is not None
    assert listeners == [None]
