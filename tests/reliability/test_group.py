"""Signals and kills of real processes of a group: exit codes, delays, messages, and restarts."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
from group_training import make_trainer, outcome

from dovetail import Epochs
from dovetail import checkpoint as store
from dovetail.callbacks import Callback, LambdaCallback
from dovetail.runtime.relay import TrainingProcessError
from dovetail.runtime.signals import Interrupted

pytestmark = [pytest.mark.full_size, pytest.mark.slow, pytest.mark.usefixtures("forking")]

_HERE = Path(__file__).parent
_TORTURE = os.environ.get("DOVETAIL_TORTURE") == "1"
_ROUNDS = 30 if _TORTURE else 1
_RESTARTS = 10 if _TORTURE else 1
# The bar is measured where nothing else runs.
_SECONDS_AFTER_A_SIGNAL, _SECONDS_AFTER_A_KILL = (5, 10) if _TORTURE else (120, 120)


@contextmanager
def _group(folder: Path, **variables: str) -> Iterator[list[Any]]:
    """Two processes that wait inside their sixth batch."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    shared |= variables
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                forked.start(
                    _HERE / "group_training.py",
                    folder,
                    folder=folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    variables={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank in range(2)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.read(1) == b".", process.communicate()[1].decode()
            yield processes
        finally:
            for process in processes:
                process.kill()


def _continue(*processes: Any) -> None:
    """Let processes continue that wait in a batch."""
    for process in processes:
        process.stdin.write(b".")
        process.stdin.flush()


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize("round", range(_ROUNDS))
def test_a_signal_to_one_process_ends_both_with_one_checkpoint(tmp_path: Path, told: int, round: int) -> None:
    with _group(tmp_path) as processes:
        processes[told].send_signal(signal.SIGTERM)
        _continue(*processes)
        assert [process.wait(timeout=_SECONDS_AFTER_A_SIGNAL) for process in processes] == [143, 143]
        errors = [process.communicate()[1].decode() for process in processes]
    assert "finishing the current update" in errors[told]
    assert "interrupted by SIGTERM after 0 epochs and 6 batches: the checkpoint is in" in errors[0]
    infos = store.list_checkpoints(tmp_path / "checkpoints")
    assert [info.path.name for info in infos] == ["ck_epoch_0_iter_3", "ck_epoch_0_iter_6"]
    store.verify(infos[-1].path)


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("round", range(_ROUNDS))
def test_a_killed_process_is_named_by_the_other_which_exits(tmp_path: Path, killed: int, round: int) -> None:
    with _group(tmp_path) as processes:
        survivor = processes[1 - killed]
        processes[killed].kill()
        _continue(survivor)
        assert survivor.wait(timeout=_SECONDS_AFTER_A_KILL) == 1
        error = survivor.communicate()[1].decode()
    assert f"PeerError: rank {killed}" in error
    assert "gone" in error
    store.verify(tmp_path / "checkpoints" / "ck_epoch_0_iter_3")


# The first process hosts the store, so the other one finds out without it.
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_ends_the_run_with_its_name(tmp_path: Path, stopped: int) -> None:
    limits = {} if _TORTURE else {"DOVETAIL_STOPPED_SECONDS": "1"}
    with _group(tmp_path, **limits) as processes:
        survivor = processes[1 - stopped]
        processes[stopped].send_signal(signal.SIGSTOP)
        _continue(survivor)
        assert survivor.wait(timeout=_SECONDS_AFTER_A_KILL) == 1
        error = survivor.communicate()[1].decode()
        assert processes[stopped].wait(timeout=_SECONDS_AFTER_A_KILL) == -signal.SIGKILL
    name = f"rank {stopped} ({socket.gethostname()}, process {processes[stopped].pid})"
    assert f"StoppedPeerError: {name} was stopped by a signal such as SIGSTOP" in error
    store.verify(tmp_path / "checkpoints" / "ck_epoch_0_iter_3")


def test_a_late_process_is_named_with_its_line_and_the_run_continues(tmp_path: Path) -> None:
    # It waits in user code for longer than every limit: only a stopped process ends a run.
    limits = {f"DOVETAIL_{name}_SECONDS": "1" for name in ("STOPPED", "SILENT", "LATE")}
    with _group(tmp_path, **limits) as processes:
        _continue(processes[0])
        # A process that starts slowly is late, too, before any batch.
        reports = iter(lambda: processes[0].stderr.readline().decode(), "")
        report = next((it for it in reports if it.endswith(" in wait\n")), "")
        _continue(processes[1])
        assert [process.wait(timeout=_SECONDS_AFTER_A_KILL) for process in processes] == [0, 0]
    name = f"rank 1 ({socket.gethostname()}, process {processes[1].pid})"
    assert report.startswith("rank 0 has waited 1 s for the other processes; not arrived: ")
    assert re.search(rf"{re.escape(name)} at group_training.py:\d+ in wait\n", report)


def test_a_late_process_ends_the_run_with_its_name_and_line_if_a_limit_is_set(tmp_path: Path) -> None:
    with _group(tmp_path, DOVETAIL_LATE_SECONDS="0", DOVETAIL_OVERDUE_SECONDS="4") as processes:
        # The late one hosts the store.
        late, survivor = processes
        _continue(survivor)
        assert survivor.wait(timeout=_SECONDS_AFTER_A_KILL) == 1
        error = survivor.communicate()[1].decode()
        # It may read that it is late before it is killed.
        assert late.wait(timeout=_SECONDS_AFTER_A_KILL) in (-signal.SIGKILL, 1)
    name = re.escape(f"rank 0 ({socket.gethostname()}, process {late.pid})")
    assert re.search(
        rf"StoppedPeerError: {name} at group_training.py:\d+ in wait did not arrive at a collective call within 4 s, "
        "so the run ends; DOVETAIL_OVERDUE_SECONDS sets this limit",
        error,
    )
    store.verify(tmp_path / "checkpoints" / "ck_epoch_0_iter_3")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="NOT TESTED: another host name needs root")
def test_a_late_process_of_another_machine_ends_itself(tmp_path: Path) -> None:
    with _group(tmp_path, DOVETAIL_OVERDUE_SECONDS="4", HOSTS="one two") as processes:
        _continue(processes[0])
        assert [process.wait(timeout=_SECONDS_AFTER_A_KILL) for process in processes] == [1, 1]
        errors = [process.communicate()[1].decode() for process in processes]
    sentence = rf"rank 1 \(two, process {processes[1].pid}\) at group_training.py:\d+ in wait did not arrive"
    assert re.search(f"StoppedPeerError: {sentence}", errors[0])
    assert re.search(f"{sentence}.*; rank 1 exits", errors[1])


def _debug(process: Any, request: int) -> None:
    """Halt a process, or let it continue, as a debugger does."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if ptrace(request, process.pid, None, None):
        pytest.skip(f"NOT TESTED: no debugger can be attached here: {os.strerror(ctypes.get_errno())}")


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: halting a process as a debugger does needs Linux")
def test_a_process_in_a_debugger_does_not_end_the_run(tmp_path: Path) -> None:
    attach, detach = 16, 17
    with _group(tmp_path, DOVETAIL_STOPPED_SECONDS="1", DOVETAIL_LATE_SECONDS="2") as processes:
        _debug(processes[1], attach)
        _continue(*processes)
        report = processes[0].stderr.readline().decode()
        assert psutil.Process(processes[1].pid).status() == psutil.STATUS_TRACING_STOP
        _debug(processes[1], detach)
        assert [process.wait(timeout=_SECONDS_AFTER_A_KILL) for process in processes] == [0, 0]
    assert "rank 0 has waited 2 s" in report


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="NOT TESTED: another host name needs root")
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_silent_process_of_another_machine_ends_the_run(tmp_path: Path, stopped: int) -> None:
    with _group(tmp_path, DOVETAIL_SILENT_SECONDS="1", HOSTS="one two") as processes:
        survivor = processes[1 - stopped]
        processes[stopped].send_signal(signal.SIGSTOP)
        assert survivor.wait(timeout=_SECONDS_AFTER_A_KILL) == 1
        error = survivor.communicate()[1].decode()
    assert f"rank {stopped} ({('one', 'two')[stopped]}, process {processes[stopped].pid})" in error
    assert f"1 s; rank {1 - stopped} exits" in error


class Killed(Callback):
    """Kills its own process, in the first attempt, when it has come to a batch."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank = rank
        self.batch = batch

    def on_step_end(self, context: Any, output: Any) -> None:
        """Leave without a word."""
        here = (context.process.share.rank, context.progress.batches, os.environ["TORCHELASTIC_RESTART_COUNT"])
        if here == (self.rank, self.batch, "0"):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module", params=[None, 2], ids=["in memory", "augmented by data workers"])
def num_workers(request: pytest.FixtureRequest) -> int | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, num_workers: int | None) -> Any:
    trainer = make_trainer(tmp_path_factory.mktemp("undisturbed"), num_workers, num_processes=2)
    with forked.forking():
        trainer.fit(max_length=Epochs(2))
    return outcome(trainer)


@pytest.mark.parametrize("round", range(_RESTARTS))
def test_a_restarted_group_ends_with_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, undisturbed: Any, num_workers: int | None, round: int
) -> None:
    draw = random.Random(round)
    trainer = make_trainer(tmp_path, num_workers, num_processes=2, max_restarts=1)
    trainer.context.callbacks.add(Killed(draw.randrange(2), draw.randrange(4, 20)))
    trainer.fit(max_length=Epochs(2))
    assert outcome(trainer) == undisturbed
    assert trainer.context.progress.epoch == 2


def test_without_restarts_the_caller_gets_the_rank_of_the_killed_process(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_processes=2)
    trainer.context.callbacks.add(Killed(1, 4))
    with pytest.raises(TrainingProcessError, match="rank 1 was ended by SIGKILL"):
        trainer.fit(max_length=Epochs(2))


def _stop_second(context: Any, output: Any) -> None:
    if context.process.share.rank == 1 and context.progress.batches == 4:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_the_caller_gets_the_rank_of_a_stopped_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_STOPPED_SECONDS", "1")
    trainer = make_trainer(tmp_path, num_processes=2)
    trainer.context.callbacks.add(LambdaCallback(on_step_end=_stop_second))
    with pytest.raises(TrainingProcessError, match=r"rank 1 \(.*\) was stopped by a signal such as SIGSTOP for 1 s"):
        trainer.fit(max_length=Epochs(2))


class StopsAndFails(Callback):
    """Stops the second process, and fails in the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, context: Any, output: Any) -> None:
        """Stop or fail at the fourth batch."""
        if context.progress.batches == 4:
            if context.process.share.rank == 0:
                raise ValueError("the first process fails")
            os.kill(os.getpid(), signal.SIGSTOP)
            (self.folder / "continued").touch()


def test_a_stopped_worker_continues_to_end_when_another_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_STOPPED_SECONDS", "0")
    trainer = make_trainer(tmp_path, num_processes=2)
    trainer.context.callbacks.add(StopsAndFails(tmp_path))
    with pytest.raises(ValueError, match="the first process fails"):
        trainer.fit(max_length=Epochs(2))
    # It received SIGTERM, and was not killed.
    assert (tmp_path / "continued").exists()


def _terminate_second(context: Any, output: Any) -> None:
    if context.process.share.rank == 1 and context.progress.batches == 5:
        os.kill(os.getpid(), signal.SIGTERM)


# `test_a_signal_to_one_of_two_processes_is_saved_and_logged_once` in `test_addons.py` covers it elsewhere.
@pytest.mark.torture
def test_a_signal_to_a_worker_interrupts_the_caller_with_the_trained_state(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_processes=2)
    trainer.context.callbacks.add(LambdaCallback(on_step_end=_terminate_second))
    with pytest.raises(Interrupted) as caught:
        trainer.fit(max_length=Epochs(2))
    assert caught.value.code == 143
    assert trainer.context.progress.batches == 6
    store.verify(tmp_path / "checkpoints" / "ck_epoch_0_iter_6")
