"""Processes that begin with torch imported, which takes seconds in a new interpreter.

The nursery is a process of its own that imports what clients need and then only forks: for every worker, and for every
one that takes the place of another. It belongs to the process that asked for it first, and ends with that, however
that ends; so do all workers.

    caller ──▷ nursery ──▷ worker, worker, …

It never runs a script: functions and classes of the caller's script come with what a worker is sent.
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

__all__ = ["Nursery", "nursery", "serve"]

# Optimizers import the second one, in half of all the time that a script takes to begin.
_PRELOADED = ("torch", "torch._dynamo", "dovetail.trainers", "dovetail.federated.backends.processes")
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dovetail.federated.backends.nursery import serve; serve(int(sys.argv[2]))"
)
# What is asked for, of which process, and how many seconds it has; and the answer: a process, or an exit code.
_REQUEST = struct.Struct("!cqd")
_ANSWER = struct.Struct("!q")
_NUM_DESCRIPTORS = 7
# How workers begin. Torch's number of threads is set in them; other libraries stay out of each other's way. Memory that
# a step frees stays for the next: else glibc may give it back and ask for it anew in every step of a small CNN.
_BEGINNING = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


class Nursery:
    """Begins and ends workers.

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
        """Return the number of a new worker, which has these descriptors.

        Raises:
            OSError: The nursery is dead.
        """
        return self._asked(b"b", descriptors=descriptors)

    def end(self, pid: int, grace: float) -> int:
        """Return the exit code of a worker: one that does not end within so many seconds is killed.

        Raises:
            OSError: The nursery is dead, and with it all workers.
        """
        return self._asked(b"e", pid, grace)

    def close(self) -> None:
        """End it, and all workers that are left."""
        self._socket.close()
        self._process.wait()

    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._socket.fileno() >= 0 and self._process.poll() is None

    def _asked(self, what: bytes, pid: int = 0, grace: float = 0.0, descriptors: Sequence[int] = ()) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [_REQUEST.pack(what, pid, grace)], descriptors)
                answer = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
            except BaseException:
                # The answer to what Ctrl-C has interrupted would be taken for that to the next request.
                self._socket.close()
                raise
        if len(answer) < _ANSWER.size:
            raise BrokenPipeError("the nursery is dead")
        return int(_ANSWER.unpack(answer)[0])


# Of this process, and in a fork of it also that of its parent, which is not its own.
_NURSERIES: dict[int, Nursery] = {}
_MAKING = threading.Lock()


def nursery() -> Nursery:
    """Return the nursery of this process, and make it if there is none that lives."""
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
    """Be the nursery: fork until nobody can ask any more."""
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
    """Be a worker, and never return."""
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
        # Torn down step by step, the threads of torch sometimes abort a process that has done its work.
        os._exit(code)
