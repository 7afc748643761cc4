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
from dovetail.runtime.signals import Interrupted, listening
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
def test_a_signal_ends_a_run_among_many(number: int, problem: Problem) -> None:
    with listening(), pytest.raises(Interrupted) as told:
        training(problem, lambda: signal.raise_signal(number)).fit(problem.batches, max_length=Epochs(1))
    assert told.value.number == number
    assert in_place() == HANDLERS


def test_a_run_among_many_leaves_the_handlers_to_the_next(problem: Problem) -> None:
    found = []
    with listening():
        before = in_place()
        for _ in range(2):
            trainer = training(problem, lambda: found.append(in_place()))
            trainer.fit(problem.batches, max_length=Epochs(1))
        assert [before, *found] == [before] * 3
    assert before != HANDLERS
    assert in_place() == HANDLERS


def test_between_runs_ctrl_c_is_that_of_python() -> None:
    with pytest.raises(KeyboardInterrupt) as told, listening():
        signal.raise_signal(signal.SIGINT)
    assert type(told.value) is KeyboardInterrupt
    assert in_place() == HANDLERS


def test_between_runs_sigterm_ends_the_process() -> None:
    child = os.fork()
    if child == 0:
        with listening():
            signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def test_handlers_of_the_users_own_stay() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with listening():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert heard == [signal.SIGTERM]


def test_signals_do_not_stop_a_run_in_another_thread(problem: Problem) -> None:
    trainer = Trainer(problem.model(), verbose=False)
    trained = threading.Thread(target=lambda: trainer.fit(problem.batches, max_length=Epochs(1)))
    listeners = []
    with listening() as mine:
        other = threading.Thread(target=lambda: listeners.append(listening().__enter__()))
        for thread in (trained, other):
            thread.start()
            thread.join()
    assert trainer.context.progress.epoch == 1
    assert mine is not None
    assert listeners == [None]
