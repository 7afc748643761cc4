"""Fork server for federated workers, which start with torch imported.

The fork server is a process that imports what clients need and then forks every worker, because the imports take
seconds in a new interpreter. It belongs to the process that created it, and ends with it, as all workers do.

    caller ──▷ fork server ──▷ worker, worker, …

It never runs a script: functions and classes of the caller's script are pickled with the worker.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from dovetail.errors import ConfigError
from dovetail.runtime.processes import end_with_parent
from dovetail.runtime.signals import ignore_interrupts

# Optimizers import the second one, which takes half of the start of a script.
_PRELOADED = ("torch", "torch._dynamo", "dovetail.trainers", "dovetail.federated.backends.processes")
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dovetail.federated.backends.fork_server import serve; serve(int(sys.argv[2]))"
)
# A request has a command, a process and a grace period in seconds; the answer is a process or an exit code.
_REQUEST = struct.Struct("!cqd")
_ANSWER = struct.Struct("!q")
_NUM_DESCRIPTORS = 7
# The environment of workers. They set torch's number of threads; other libraries have one thread. Freed memory is kept,
# because otherwise glibc may return it to the system and request it again in every step of a small CNN.
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


class ForkServer:
    """Starts and stops workers.

    Raises:
        ConfigError: Processes cannot be forked on this system.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith(("linux", "darwin")):
            raise ConfigError(f"backend: 'process' needs Linux or macOS, and this is {sys.platform}; use 'sequential'")
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_WORKER_ENVIRONMENT},
            )

    def start_worker(self, descriptors: Sequence[int]) -> int:
        """Start a worker with these descriptors, and return its process id.

        Raises:
            OSError: The fork server is dead.
        """
        return self._send_request(b"b", descriptors=descriptors)

    def stop_worker(self, pid: int, grace: float) -> int:
        """Return the exit code of a worker, which is killed if it does not exit in the grace period in seconds.

        Raises:
            OSError: The fork server is dead, and with it all workers.
        """
        return self._send_request(b"e", pid, grace)

    def close(self) -> None:
        """Stop the fork server and all its workers."""
        self._socket.close()
        self._process.wait()

    def is_alive(self) -> bool:
        """Return whether it can receive requests."""
        return self._socket.fileno() >= 0 and self._process.poll() is None

    def _send_request(self, what: bytes, pid: int = 0, grace: float = 0.0, descriptors: Sequence[int] = ()) -> int:
        with self._lock:
            try:
                # The descriptors of pipes and shared memory travel with the request, because a worker inherits no
                # others from the fork server.
                socket.send_fds(self._socket, [_REQUEST.pack(what, pid, grace)], descriptors)
                answer = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
            except BaseException:
                # Otherwise the answer to an interrupted request would be read as the answer to the next one.
                self._socket.close()
                raise
        if len(answer) < _ANSWER.size:
            raise BrokenPipeError("the fork server is dead")
        return int(_ANSWER.unpack(answer)[0])


# By process id, because a fork of this process inherits the fork server of its parent.
_FORK_SERVERS: dict[int, ForkServer] = {}
_CREATION_LOCK = threading.Lock()


def fork_server() -> ForkServer:
    """Return the fork server of this process; start one if there is none."""
    me = os.getpid()
    with _CREATION_LOCK:
        found = _FORK_SERVERS.get(me)
        if found is not None:
            if found.is_alive():
                return found
            found.close()
        _FORK_SERVERS[me] = server = ForkServer()
        if found is None:
            atexit.register(_close, me)
        return server


def _close(owner: int) -> None:
    if owner == os.getpid():
        _FORK_SERVERS.pop(owner).close()


# ------------------------------------------------------------------ in the fork server


def serve(descriptor: int) -> None:
    """Run the fork server: fork workers until the caller closes the socket."""
    # Ctrl-C reaches all processes of the terminal; only the caller handles it, and then stops the workers.
    ignore_interrupts()
    for name in _PRELOADED:
        importlib.import_module(name)
    from dovetail.federated.backends.processes import run_worker

    requests = socket.socket(fileno=descriptor)
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST.size, _NUM_DESCRIPTORS)
        if not message:
            break
        what, pid, grace = _REQUEST.unpack(message)
        if what == b"b":
            answer = os.fork()
            # In the child: the socket belongs to the fork server, whose end the caller notices when it is closed
            # everywhere.
            if answer == 0:
                requests.close()
                _run_and_exit(run_worker, descriptors)
            children.add(answer)
            # Otherwise the fork server would keep pipes open, and the caller would not notice the end of a worker.
            for each in descriptors:
                os.close(each)
        else:
            answer = _exit_code(pid, grace)
            children.discard(pid)
        requests.sendall(_ANSWER.pack(answer))
    # The caller has closed the socket or is dead; its workers have nothing to answer to.
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _exit_code(pid: int, grace: float) -> int:
    deadline = time.monotonic() + grace
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.002)


def _run_and_exit(run_worker: Callable[[Sequence[int]], None], descriptors: Sequence[int]) -> None:
    """Run a worker, and exit the process."""
    code = 1
    try:
        end_with_parent(os.getppid(), signal.SIGKILL)()
        run_worker(descriptors)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Without the normal teardown, in which threads of torch sometimes abort the process.
        os._exit(code)
