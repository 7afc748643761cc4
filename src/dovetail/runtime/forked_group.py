"""Group of forked worker processes that are started, monitored, signalled and restarted together."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from dovetail.runtime.elastic import open_store
from dovetail.runtime.fork_server import ForkServer, shared_fork_server
from dovetail.runtime.relay import TrainingProcessError
from dovetail.runtime.signals import preserved_handlers

# Seconds in which workers finish their update and save after a stop request.
_GRACE = 30
# Seconds in which workers exit by themselves after one of them was killed.
_PATIENCE = 5
# Seconds between two checks of the workers: a tenth of the time so far, but never longer than the second number.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
# Optimizers import the second one, which takes half of the start of a script.
_PRELOADED = ("torch", "torch._dynamo", "torch.distributed.nn.functional", "dovetail.trainers")
# Packages that take long to import, and that start no threads except such that survive a fork. The fork server imports
# them if the caller has. Modules of the user are not among them: every group imports these again, because they may have
# changed.
_PACKAGES = ("peft", "timm", "torchmetrics", "torchvision", "transformers")
_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "dovetail.trainers.",
    "dovetail.callbacks.",
    "dovetail.data.",
)
# Prefixes of variables that Python, torch or their libraries read when they start.
_EARLY_VARIABLES = ("ATEN_", "CUDA_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) if sys.platform != "win32" else ()


def run_group(target: str, arguments: Sequence[str], num_processes: int, max_restarts: int = 0) -> dict[int, int] | int:
    """Run a function in several worker processes that form one group, until they end.

    The workers are forked from a process that has imported torch, and otherwise start like new processes of the caller:
    with its environment, working directory, standard streams and cores. They connect over the loopback interface. When
    one fails, all are stopped and restarted, at most `max_restarts` times. Signals that end this process are sent to
    all workers. If this process is killed, its workers are killed, too.

    Args:
        target: The function, as `module:name`. It calls `become_worker` and receives the descriptors and the details.
        arguments: Arguments of the function, in `details["arguments"]`.
        num_processes: The number of processes.
        max_restarts: How often a group with a failed process is restarted.

    Returns:
        The exit codes of failed workers by rank, or the signal that ended them.

    Raises:
        TrainingProcessError: The process that workers are forked from dies when it starts.
    """
    with _received_signals() as received:
        failures: dict[int, int] = {}
        for attempt in range(max_restarts + 1):
            failures = _run_once(target, arguments, num_processes, (attempt, max_restarts), received)
            if received or not failures:
                break
        return received[0] if received else failures


def become_worker(descriptors: Sequence[int], details: Mapping[str, Any]) -> None:
    """Give a forked process the streams, the environment and the settings of the caller, as a new process has them."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(details["environment"])
    os.chdir(details["folder"])
    os.sched_setaffinity(0, details["cores"])
    # The fork server ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class _Workers:
    """The running workers of a group, and the exit codes of the others."""

    server: ForkServer
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)

    def poll(self) -> bool:
        """Collect exit codes, and return whether workers run."""
        for rank, pid in list(self.pids.items()):
            try:
                code = self.server.poll_worker(pid)
            except OSError:
                # The kernel kills the workers of a fork server that has died.
                code = -signal.SIGKILL
            if code is not None:
                self.codes[rank] = code
                del self.pids[rank]
        return bool(self.pids)

    def send(self, number: int) -> None:
        """Send a signal to the running workers and their data workers."""
        for pid in self.pids.values():
            # A worker that is stopped receives a signal only after it continues.
            for each in (number, signal.SIGCONT):
                # The process has not called `setsid` yet, or its code was not collected yet.
                try:
                    os.killpg(pid, each)
                except ProcessLookupError:
                    with suppress(ProcessLookupError):
                        os.kill(pid, each)

    def stop(self, number: int, received: list[int]) -> None:
        """Send a signal, and each signal that arrives later; kill the workers after a grace period."""
        if not self.pids:
            return
        while self.pids:
            known = len(received)
            self.send(number)
            pauses = _pauses(_GRACE)
            while self.poll() and len(received) == known and next(pauses, False):
                pass
            if len(received) == known:
                break
            number = received[-1]
        self.send(signal.SIGKILL)
        # A process in an uninterruptible system call does not end even then.
        for _ in _pauses(_GRACE):
            if not self.poll():
                break


def _run_once(
    target: str, arguments: Sequence[str], num_processes: int, attempt: tuple[int, int], received: list[int]
) -> dict[int, int]:
    """Run a group until all workers have ended or one has failed, and return the exit codes of the failed ones."""
    server = _running_server(target)
    # The store lives as long as this variable. Every attempt has a new one: the previous store contains the addresses
    # of ended processes.
    store, port = open_store()
    workers = _Workers(server)
    failures: dict[int, int] = {}
    try:
        with _standard_streams() as streams:
            for rank in range(num_processes):
                details = _details(arguments, rank, num_processes, port, attempt)
                try:
                    workers.pids[rank] = server.start_worker(streams, details)
                except OSError:
                    # The fork server was killed, and with it the workers.
                    workers.codes[rank] = -signal.SIGKILL
        for _ in _pauses():
            is_running = workers.poll()
            failures = {rank: code for rank, code in workers.codes.items() if code}
            if failures or received or not is_running:
                break
        if -signal.SIGKILL in failures.values():
            # The others notice it and exit. Their errors may have the reason: a process that stays stopped is killed by
            # another worker. A signal could end them before they have written their errors.
            for _ in _pauses(_PATIENCE):
                if received or not workers.poll():
                    break
    finally:
        # After a failure, and when the caller is stopped.
        workers.stop(received[0] if received else signal.SIGTERM, received)
        del store
    return failures


def _running_server(target: str) -> ForkServer:
    """Return a fork server that answers, with the packages that this process has imported."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_EARLY_VARIABLES)}
    names = [name for name in list(sys.modules) if name.startswith(_MODULES) or name.partition(".")[0] in _PACKAGES]
    for _ in range(2):
        server = shared_fork_server(target, _PRELOADED, {}, version=variables)
        # It may have died since the last group.
        with suppress(OSError):
            server.preload(names)
            return server
    raise TrainingProcessError(
        "processes cannot be started: the process that they are forked from died when it started"
    )


def _details(
    arguments: Sequence[str], rank: int, num_processes: int, port: int, attempt: tuple[int, int]
) -> dict[str, Any]:
    # The variables of torchrun, for the process group and for the user's code.
    own = {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
        **{name: str(num_processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "dovetail",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt[0]),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt[1]),
        "TORCHELASTIC_RUN_ID": f"dovetail-{os.getpid()}-{port}",
        # The caller's store, which outlives the workers.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {
        "arguments": list(arguments),
        "environment": {**os.environ, **own},
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
    }


def _pauses(seconds: float = float("inf")) -> Iterator[bool]:
    """Sleep at every step, at most until a time is over."""
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        time.sleep(min(max(_SHORTEST_PAUSE, passed / 10), _LONGEST_PAUSE))
        yield True


@contextmanager
def _standard_streams() -> Iterator[list[int]]:
    """Return the descriptors of the standard streams; the null device replaces a closed one."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        yield [number if _is_open(number) else null for number in range(3)]
    finally:
        os.close(null)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Collect the signals that end this process. Only in the main thread; otherwise the list stays empty."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    with preserved_handlers(*_SIGNALS):
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: received.append(number))
        yield received
