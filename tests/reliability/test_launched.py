"""Kills, signals and changes between the entry points of a trainer that starts its own processes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import torch
from launched_training import DATA, INPUTS, Whereabouts, make_trainer

from dovetail import Batches, Epochs
from dovetail.callbacks import Callback
from dovetail.runtime.relay import TrainingProcessError
from dovetail.runtime.signals import Interrupted
from dovetail.trainers import launching

pytestmark = [
    pytest.mark.full_size,
    pytest.mark.slow,
    pytest.mark.usefixtures("forking"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only"),
]

_HERE = Path(__file__).parent
_TORTURE = os.environ.get("DOVETAIL_TORTURE") == "1"


def _wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _columns(trainer: Any) -> tuple[set[int], ...]:
    """Return the processes that compute predictions, their parents, the scale and the length of the folder's name."""
    return tuple({int(value) for value in column} for column in trainer.predict(INPUTS).T)


def test_entry_points_have_new_processes_of_one_fork_server() -> None:
    trainer = make_trainer(Whereabouts())
    first, first_parents, *_ = _columns(trainer)
    num_files = len(os.listdir("/proc/self/fd"))
    second, second_parents, *_ = _columns(trainer)
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert len(first) == len(second) == 2
    assert first.isdisjoint(second)
    assert first_parents == second_parents
    assert len(first_parents) == 1
    _wait_until(lambda: all(map(_is_gone, first | second)))
    assert not any(map(_is_gone, first_parents))


def test_workers_get_the_weights_variables_and_folder_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(Whereabouts())
    *_, scale, folder = _columns(trainer)
    assert (scale, folder) == ({1}, {len(os.getcwd())})
    monkeypatch.setenv("SCALE", "3")
    monkeypatch.chdir(tmp_path)
    with torch.no_grad():
        trainer.model.scale.fill_(2)
    *_, scale, folder = _columns(trainer)
    assert (scale, folder) == ({6}, {2 * len(str(tmp_path))})


def test_a_module_that_changed_between_two_calls_is_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from torch import nn\n\nclass Net(nn.Module):\n    def forward(self, x):\n        return x + {}\n"
    path = tmp_path / "changing_module.py"
    monkeypatch.syspath_prepend(tmp_path)
    path.write_text(source.format(1), encoding="utf-8")
    module = importlib.import_module("changing_module")
    try:
        assert make_trainer(module.Net()).predict(INPUTS).equal(INPUTS + 1)
        path.write_text(source.format(20), encoding="utf-8")
        importlib.reload(module)
        assert make_trainer(module.Net()).predict(INPUTS).equal(INPUTS + 20)
    finally:
        del sys.modules["changing_module"]


def test_variables_that_are_read_at_the_start_get_a_new_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(Whereabouts())
    _, parents, *_ = _columns(trainer)
    monkeypatch.setenv("OPENBLAS_MAIN_FREE", "0")
    _, others, *_ = _columns(trainer)
    assert parents.isdisjoint(others)
    _wait_until(lambda: all(map(_is_gone, parents)))


def test_a_fork_server_that_was_killed_between_calls_is_replaced() -> None:
    trainer = make_trainer(Whereabouts())
    _, parents, *_ = _columns(trainer)
    (parent,) = parents
    # The system needs some time to end it: the next call may find it with and without an exit code.
    os.kill(parent, signal.SIGKILL)
    _, others, *_ = _columns(trainer)
    assert parents.isdisjoint(others)


class KillsForkServer(Callback):
    """Kills the process that it was forked from, in the first attempt, after a batch."""

    def on_step_end(self, context: Any, output: Any) -> None:
        here = context.process.share.rank, context.progress.batches, os.environ["TORCHELASTIC_RESTART_COUNT"]
        if here == (1, 2, "0"):
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()


def test_a_fork_server_killed_in_a_run_is_an_error_or_a_restart() -> None:
    with pytest.raises(TrainingProcessError, match="rank 0 was ended by SIGKILL and rank 1 was ended by SIGKILL"):
        make_trainer(None, KillsForkServer()).fit(DATA, max_length=Epochs(1))
    restarted, expected = make_trainer(None, KillsForkServer(), max_restarts=1), make_trainer()
    for trainer in (restarted, expected):
        trainer.fit(DATA, max_length=Epochs(1))
    assert restarted.model.weight.equal(expected.model.weight)
    assert restarted.history.losses == expected.history.losses


class SignalsCaller(Callback):
    """Sends signals to the caller: the first one in a batch, the others when it has arrived in this process."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.caller = os.getpid()

    def on_step_end(self, context: Any, output: Any) -> None:
        if context.process.share.rank == 0 and context.progress.batches == 2:
            first, *others = self.numbers
            os.kill(self.caller, first)
            while context.run.stop_request is None:
                pass
            for number in others:
                os.kill(self.caller, number)
                signal.pause()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_caller_stops_all_workers_with_their_state(number: signal.Signals) -> None:
    handlers = [signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    trainer = make_trainer(None, SignalsCaller(number))
    with pytest.raises(Interrupted) as caught:
        trainer.fit(DATA, max_length=Epochs(5))
    assert (caught.value.code, caught.value.at_once) == (128 + number, False)
    assert trainer.context.progress.batches == 3
    expected = make_trainer()
    expected.fit(DATA, max_length=Batches(3))
    assert trainer.model.weight.equal(expected.model.weight)
    assert [signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers


def test_a_second_signal_to_the_caller_ends_workers_at_once() -> None:
    trainer = make_trainer(None, SignalsCaller(signal.SIGINT, signal.SIGINT))
    weight = trainer.model.weight.clone()
    with pytest.raises(Interrupted):
        trainer.fit(DATA, max_length=Epochs(5))
    assert trainer.context.progress.batches == 0
    assert trainer.model.weight.equal(weight)


@pytest.mark.parametrize("holds", [[], *([["holds"]] if _TORTURE else [])], ids=str)
def test_no_worker_outlives_a_killed_caller(tmp_path: Path, holds: list[str]) -> None:
    with (tmp_path / "log").open("w") as log:
        caller = forked.start(_HERE / "launched_training.py", tmp_path, *holds, folder=tmp_path, stdout=log, stderr=log)
        try:
            files = [tmp_path / f"worker-{rank}" for rank in range(2)]
            _wait_until(lambda: all(file.exists() for file in files))
            others = {int(word) for file in files for word in file.read_text(encoding="ascii").split()}
            assert len(others) == 3  # two workers and their fork server
            assert not any(map(_is_gone, others))
        finally:
            caller.kill()
            caller.wait()
    try:
        _wait_until(lambda: all(map(_is_gone, others)))
    finally:
        if holds:
            os.kill(int((tmp_path / "child").read_text(encoding="ascii")), signal.SIGKILL)


def test_new_interpreters_return_what_forked_processes_return(monkeypatch: pytest.MonkeyPatch) -> None:
    forks, fresh = make_trainer(), make_trainer()
    forks.fit(DATA, max_length=Epochs(1))
    monkeypatch.setattr(launching, "_FORKS", False)
    fresh.fit(DATA, max_length=Epochs(1))
    assert fresh.model.weight.equal(forks.model.weight)
    predictions, metrics = fresh.predict(INPUTS), fresh.evaluate(DATA)
    monkeypatch.undo()
    assert forks.predict(INPUTS).equal(predictions)
    assert forks.evaluate(DATA) == metrics
