"""Clients in real processes, which are killed, hang, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from doing import Doing, Fragile, die, done, faults, hang, started, tasks
from forked import forking, run, start

from dovetail.errors import ConfigError
from dovetail.federated.backends import Backend, Done, Process, Sequential, Worker, WorkerError, processes
from dovetail.federated.backends import fork_server as fork_servers
from dovetail.federated.backends.shared_memory import Block, Mailbox, pack
from dovetail.federated.messages import Fault, Task, Update
from dovetail.federated.states import ClientState

# Workers cannot import what pytest has loaded from a path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).with_name("unguarded.py")


def running(worker: Worker, num_workers: int = 2, timeout: float | None = None) -> AbstractContextManager[Backend]:
    return started(Process(num_workers, timeout), worker)


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)
    return found


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_workers_are_started_once() -> None:
    with running(Doing()) as backend:
        pids = [{it["pid"] for it in done(list(backend.run(tasks(8, number)))).values()} for number in (1, 2, 3)]
    assert len(set.union(*pids)) <= 2
    assert os.getpid() not in set.union(*pids)


def test_clients_run_in_parallel(tmp_path: Path) -> None:
    """Each of two clients waits for the other."""

    def meet(mine: str, other: str) -> None:
        (tmp_path / mine).touch()
        wait_until((tmp_path / other).exists)

    with running(Doing({1: lambda: meet("a", "b"), 2: lambda: meet("b", "a")})) as backend:
        assert done(list(backend.run(tasks(2)))).keys() == {1, 2}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_client_is_left_out_and_the_round_continues(num_workers: int) -> None:
    with running(Doing({3: die}), num_workers) as backend:
        first, second = list(backend.run(tasks(6))), list(backend.run(tasks(2, number=2)))
    reason = "its process was ended by SIGKILL (the system does so when memory is short)"
    assert faults(first) == [Fault(3, 1, "crashed", reason)]
    assert done(first).keys() == {1, 2, 4, 5, 6}
    assert done(second).keys() == {1, 2}


def test_a_client_that_exits_is_reported_with_its_exit_code() -> None:
    with running(Doing({1: lambda: sys.exit(7)})) as backend:
        (fault,) = faults(list(backend.run(tasks(2))))
    assert fault == Fault(1, 1, "crashed", "its process ended with exit code 7")


def test_a_worker_that_dies_between_rounds_loses_no_client() -> None:
    with running(Doing(), num_workers=1) as backend:
        (before,) = done(list(backend.run(tasks(1)))).values()
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(lambda: is_gone(before["pid"]))
        outcomes = list(backend.run(tasks(2)))
    assert faults(outcomes) == []
    assert before["pid"] not in {it["pid"] for it in done(outcomes).values()}


@pytest.mark.usefixtures("forking")
def test_a_killed_fork_server_is_replaced() -> None:
    with running(Doing()) as backend:
        list(backend.run(tasks(8)))
        # All of them: one alone may have done all the work.
        pids = [handle.pid for handle in backend._handles]
        home = fork_servers.fork_server()
        os.kill(home._process.pid, signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, pids)))
        outcomes = list(backend.run(tasks(4)))
    assert faults(outcomes) == []
    assert fork_servers.fork_server() is not home


@pytest.mark.usefixtures("forking")
def test_a_fork_server_that_is_ending_is_replaced() -> None:
    home = fork_servers.fork_server()
    os.kill(home._process.pid, signal.SIGKILL)
    # It has no exit code yet, because the system frees its memory first.
    assert fork_servers.fork_server() is not home


def test_a_client_over_the_timeout_is_left_out_and_its_process_ended(tmp_path: Path) -> None:
    def hang_for_long() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        hang()

    with running(Doing({2: hang_for_long}), timeout=2.0) as backend:
        outcomes = list(backend.run(tasks(4)))
        assert is_gone(int((tmp_path / "pid").read_text()))
    assert faults(outcomes) == [Fault(2, 1, "timed out", "no answer after 2 s")]
    assert done(outcomes).keys() == {1, 3, 4}


def test_a_client_over_the_timeout_is_waited_for_only_once() -> None:
    """Its worker is busy, and does not exit by itself."""
    with running(Doing({1: hang}), num_workers=1, timeout=0.5) as backend:
        start_time = time.monotonic()
        assert len(faults(list(backend.run(tasks(1))))) == 1
        assert time.monotonic() - start_time < 0.5 + processes._GRACE / 2


class Estimating(Doing):
    """Has a cost estimate for each client."""

    def estimate_cost(self, task: Task) -> float:
        return {1: 10.0, 2: 40.0, 3: 20.0, 4: 30.0}[task.client_id]


def test_the_longest_task_starts_first() -> None:
    with running(Estimating(), num_workers=1) as backend:
        assert list(done(list(backend.run(tasks(4))))) == [2, 4, 3, 1]


def test_a_worker_receives_its_next_task_before_it_answers(tmp_path: Path) -> None:
    """The first client waits until the server has given its worker another one."""

    def wait() -> None:
        wait_until((tmp_path / "given").exists)

    class ReportingProcess(Process):
        def _send_task(self, handle: Any, position: int) -> bool:
            is_given = super()._send_task(handle, position)
            if handle.assigned_tasks:
                (tmp_path / "given").touch()
            return is_given

    with started(ReportingProcess(num_workers=1), Estimating({2: wait})) as backend:
        outcomes = list(backend.run(tasks(4)))
    assert done(outcomes).keys() == {1, 2, 3, 4}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_unstarted_tasks_of_a_dead_worker_are_requeued(num_workers: int) -> None:
    with running(Estimating({2: die, 3: die}), num_workers) as backend:
        outcomes = list(backend.run(tasks(4)))
    assert sorted(fault.client_id for fault in faults(outcomes)) == [2, 3]
    assert done(outcomes).keys() == {1, 4}


@pytest.mark.parametrize(("deed", "left_out"), [(lambda: None, set()), (hang, {2})], ids=["answers", "hangs"])
def test_tasks_and_answers_larger_than_a_pipe_do_not_deadlock(deed: Callable[[], Any], left_out: set[int]) -> None:
    """The next task is given to a worker that does not read it yet, and may be about to answer, or never to."""
    work = [(task, {"plain": list(range(300_000))}) for task, _ in tasks(4)]
    with running(Estimating({2: deed}), num_workers=1, timeout=3.0) as backend:
        outcomes: list[Any] = []
        # A server that waits without end cannot report it.
        server = threading.Thread(target=lambda: outcomes.extend(backend.run(work)), daemon=True)
        server.start()
        server.join(60)
    assert done(outcomes).keys() == {1, 2, 3, 4} - left_out
    assert {fault.client_id for fault in faults(outcomes)} == left_out


def test_tasks_without_a_cost_estimate_wait_for_a_free_worker(tmp_path: Path) -> None:
    """The first client waits for all others, so none of them may stand behind it."""

    class Unknown(Doing):
        def estimate_cost(self, task: Task) -> None:
            return None

    def wait() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 5)

    others = {number: (tmp_path / str(number)).touch for number in range(2, 7)}
    with running(Unknown({1: wait, **others})) as backend:
        assert done(list(backend.run(tasks(6)))).keys() == set(range(1, 7))


def test_workers_share_one_copy_of_the_data() -> None:
    """Workers map what the client holds, and what one changes is changed for itself alone."""

    class Holding:
        def __init__(self) -> None:
            self.tensor, self.array = torch.zeros(1 << 20), torch.ones(1 << 20).numpy()

        def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
            is_mapped = "memfd:dovetail" in Path("/proc/self/maps").read_text()
            before = float(self.tensor[0] + self.array[0])
            self.tensor += 1
            self.array += 1
            return Update(task.client_id, 1, 1, payload={"before": before, "is_mapped": is_mapped}), state

    worker = Holding()
    with running(worker, num_workers=1) as backend:
        (first, second) = done(list(backend.run(tasks(2)))).values()
    assert (first["before"], second["before"]) == (1.0, 3.0)
    assert float(worker.tensor.max()) == 0.0
    assert first["is_mapped"]


def test_a_worker_computes_with_the_settings_of_the_server() -> None:
    def found() -> tuple[Any, ...]:
        return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()

    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with running(Doing({1: found})) as backend:
            told = done(list(backend.run(tasks(1))))[1]["told"]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert told == (torch.float64, True, 1)


def test_a_worker_reads_the_shared_weights_once() -> None:
    """Everything that several tasks share is stored once: the weights, and the payload of an algorithm."""
    common = {"w": torch.arange(5.0), "c": torch.arange(3)}

    class Looking:
        def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
            places = task.weights["w"].data_ptr(), task.payload["c"].data_ptr(), state["own"].data_ptr()
            return Update(task.client_id, 1, int(state["own"]), payload={"places": places}), state

    weights = {"w": common["w"]}
    work = [(Task(1, n, weights, payload={"c": common["c"]}), {"own": torch.tensor(n)}) for n in (1, 2, 3)]
    with running(Looking(), num_workers=1) as backend:
        outcomes = list(backend.run(work))
    places = [it["places"] for it in done(outcomes).values()]
    assert len({each[:2] for each in places}) == 1
    assert [it.update.num_samples for it in outcomes if isinstance(it, Done)] == [1, 2, 3]


def test_a_tensor_kept_from_a_message_does_not_keep_the_message_alive() -> None:
    here = Mailbox()
    there = Mailbox([os.dup(each) for each in here.descriptors])
    update, state = pack(torch.ones(1000)).bulk, pack(torch.ones(3)).bulk
    _, (large, small) = there.fetch(here.post("letter", [*update, *state]))
    assert (large.nbytes, small.nbytes) == (4000, 12)
    assert memoryview(small.obj).nbytes == 12
    here.close()
    there.close()


def test_an_answer_that_cannot_be_sent_is_a_fault_of_its_client() -> None:
    with running(Doing({1: threading.Lock})) as backend:
        (fault,) = faults(list(backend.run(tasks(2))))
    assert (fault.client_id, fault.reason) == (1, "TypeError: cannot pickle '_thread.lock' object")


def test_a_client_that_cannot_be_pickled_is_rejected_in_one_sentence() -> None:
    worker = Doing()
    worker.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"the client or its data cannot be sent to other processes: cannot pickle"):
        Process(1).start(worker)


def test_a_client_that_cannot_be_unpickled_is_rejected_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"the client cannot be received by another process: .*no such disk here"):
        Process(1).start(Fragile())


class Deadly(Doing):
    def __setstate__(self, state: Any) -> None:
        die()


def test_workers_that_never_become_ready_raise_an_error() -> None:
    with pytest.raises(WorkerError, match="workers cannot be started: its process was ended by SIGKILL"):
        Process(1).start(Deadly())


def test_a_closed_backend_leaves_no_open_files() -> None:
    fork_servers.fork_server()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with running(Doing({1: die})) as backend:
        pids = {it["pid"] for it in done(list(backend.run(tasks(5)))).values()}
        assert len(os.listdir("/proc/self/fd")) > before
    assert all(map(is_gone, pids))
    assert len(os.listdir("/proc/self/fd")) == before


def test_unused_shared_memory_is_freed() -> None:
    """As when a worker fails to start, so that its resources are not closed by it."""
    block = Block()
    descriptor = block.descriptor
    os.fstat(descriptor)
    del block
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_workers": 0}, "num_workers: expected at least 1"),
        ({"timeout": 0.0}, "timeout: expected a positive number"),
    ],
)
def test_invalid_numbers_of_workers_are_rejected(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Process(**arguments)


@pytest.mark.full_size
@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    ended = run(SCRIPT, str(tmp_path), folder=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert (tmp_path / "answers").read_text() == "[(1, 6.0), (2, 12.0)]"


@pytest.mark.full_size
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_server(number: signal.Signals, tmp_path: Path) -> None:
    # One of them has a fork server that no other process has forked.
    with (tmp_path / "log").open("w") as log, nullcontext() if number == signal.SIGKILL else forking():
        server = start(SCRIPT, str(tmp_path), "wait", folder=tmp_path, stdout=log, stderr=log)
        try:
            files = [tmp_path / "worker-1", tmp_path / "worker-2"]
            wait_until(lambda: all(file.exists() for file in files))
            others = {int(word) for file in files for word in file.read_text().split()}
            server.send_signal(number)
            server.wait(60)
        finally:
            server.kill()
    assert len(others) == 3  # two workers and their fork server
    wait_until(lambda: all(map(is_gone, others)))


@pytest.mark.full_size
@pytest.mark.slow
def test_answers_of_processes_equal_serial_ones_bit_for_bit() -> None:
    from dovetail.clients import simple
    from dovetail.servers import fedavg
    from dovetail.trainers.composable import ComposableTrainer

    def weights(backend: Backend) -> bytes:
        trainer = ComposableTrainer(num_epochs=2, batch_size=16, learning_rate=0.1)
        server = fedavg.Server(rounds=3, total_clients=8, per_round=4, backend=backend)
        server.run(simple.Client(trainer=trainer))
        return pickle.dumps({name: value.numpy().tobytes() for name, value in server.weights.items()})

    assert weights(Process(2)) == weights(Sequential())
