"""Fork server for federated workers, which start with torch imported.

The nursery is a process that imports what clients need and then forks every worker, because the imports take seconds in
a new interpreter. It belongs to the process that created it, and ends with it, as all workers do.

    caller ──▷ nursery ──▷ worker, worker, …

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
    "from dovetail.federated.backends.nursery import serve; serve(int(sys.argv[2]))"
)
# A request has a command, a process and a grace period in seconds; the answer is a process or an exit code.
_REQUEST = struct.Struct("!cqd")
_ANSWER = struct.Struct("!q")
_NUM_DESCRIPTORS = 7
# The environment of workers. They set torch's number of threads; other libraries have one thread. Freed memory is kept,
# because otherwise glibc may return it to the system and request it again in every step of a small CNN.
_BEGINNING = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


class Nursery:
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
                env={**os.environ, **_BEGINNING},
            )

    def begin(self, descriptors: Sequence[int]) -> int:
        """Start a worker with these descriptors, and return its process id.

        Raises:
            OSError: The nursery is dead.
        """
        return self._asked(b"b", descriptors=descriptors)

    def end(self, pid: int, grace: float) -> int:
        """Return the exit code of a worker, which is killed if it does not exit in the grace period in seconds.

        Raises:
            OSError: The nursery is dead, and with it all workers.
        """
        return self._asked(b"e", pid, grace)

    def close(self) -> None:
        """Stop the nursery and all its workers."""
        self._socket.close()
        self._process.wait()

    def is_alive(self) -> bool:
        """Return whether it can receive requests."""
        return self._socket.fileno() >= 0 and self._process.poll() is None

    def _asked(self, what: bytes, pid: int = 0, grace: float = 0.0, descriptors: Sequence[int] = ()) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [_REQUEST.pack(what, pid, grace)], descriptors)
                answer = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
            except BaseException:
                # Otherwise the answer to an interrupted request would be read as the answer to the next one.
                self._socket.close()
                raise
        if len(answer) < _ANSWER.size:
            raise BrokenPipeError("the nursery is dead")
        return int(_ANSWER.unpack(answer)[0])


# By process id, because a fork of this process inherits the nursery of its parent.
_NURSERIES: dict[int, Nursery] = {}
_MAKING = threading.Lock()


def nursery() -> Nursery:
    """Return the nursery of this process; start one if there is none."""
    me = os.getpid()
    with _MAKING:
        found = _NURSERIES.get(me)
        if found is not None:
            if found.is_alive():
                return found
            found.close()
        _NURSERIES[me] = made = Nursery()
        if found is None:
            atexit.register(_close, me)
        return made


def _close(owner: int) -> None:
    if owner == os.getpid():
        _NURSERIES.pop(owner).close()


# ------------------------------------------------------------------ in the nursery


def serve(descriptor: int) -> None:
    """Run the nursery: fork workers until the caller closes the socket."""
    ignore_interrupts()
    for name in _PRELOADED:
        importlib.import_module(name)
    from dovetail.federated.backends.processes import live

    requests = socket.socket(fileno=descriptor)
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST.size, _NUM_DESCRIPTORS)
        if not message:
            break
        what, pid, grace = _REQUEST.unpack(message)
        if what == b"b":
            answer = os.fork()
            if answer == 0:
                requests.close()
                _be(live, descriptors)
            children.add(answer)
            for each in descriptors:
                os.close(each)
        else:
            answer = _exit_code(pid, grace)
            children.discard(pid)
        requests.sendall(_ANSWER.pack(answer))
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


def _be(live: Callable[[Sequence[int]], None], descriptors: Sequence[int]) -> None:
    """Run a worker, and exit the process."""
    code = 1
    try:
        end_with_parent(os.getppid(), signal.SIGKILL)()
        live(descriptors)
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
