"""Fork server: workers of this machine that start with torch imported.

The fork server is a process that imports what workers need and then forks every worker, because the imports take
seconds in a new interpreter. It belongs to the process that created it, and ends with it, as all workers do.

    caller ──▷ fork server ──▷ worker, worker, …

It never runs a script and has no data: functions and classes of the caller's script are pickled for the worker.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dovetail.runtime.processes import end_with_parent
from dovetail.runtime.signals import ignore_interrupts

_PROGRAM = (
    "import json, sys; path, names, target = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from dovetail.runtime.fork_server import serve; serve(int(sys.argv[2]), names, target)"
)
# A request has a command, a process, a grace period in seconds and the number of bytes that follow; the answer is a
# process or an exit code.
_REQUEST = struct.Struct("!cqdq")
_ANSWER = struct.Struct("!q")
# An exit code that no process has.
_RUNNING = 1 << 40
_NUM_DESCRIPTORS = 7
# Seconds after which the fork server checks whether its parent is alive.
_CHECK_EVERY = 1.0


class ForkServer:
    """Starts and stops workers.

    Args:
        target: The function of the workers, as `module:name`. It receives the descriptors and the details of a request.
        preloaded: The modules that the fork server imports.
        environment: Environment variables of the fork server, besides the variables of this process.
    """

    def __init__(self, target: str, preloaded: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._preloaded = set(preloaded)
        self._num_workers = 0
        self._socket, theirs = socket.socketpair()
        with theirs:
            given = json.dumps([sys.path, list(preloaded), target])
            command = [sys.executable, "-c", _PROGRAM, given, str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                # Signals of a terminal reach only the caller, which forwards those that are meant for workers.
                start_new_session=True,
            )

    def preload(self, names: Sequence[str]) -> None:
        """Import more modules in the fork server, for all later workers; a module that cannot be imported is skipped.

        Raises:
            OSError: The fork server is dead.
        """
        missing = [name for name in names if name not in self._preloaded]
        if missing:
            self._send_request(b"i", body=json.dumps(missing).encode())
            self._preloaded.update(missing)

    def start_worker(self, descriptors: Sequence[int], details: Mapping[str, Any] | None = None) -> int:
        """Start a worker with these descriptors, and return its process id.

        Args:
            descriptors: Open files that the worker receives, at most seven.
            details: More arguments of the worker, in the form of JSON.

        Raises:
            OSError: The fork server is dead.
        """
        pid = self._send_request(b"b", descriptors=descriptors, body=json.dumps(details or {}).encode())
        self._num_workers += 1
        return pid

    def stop_worker(self, pid: int, grace: float) -> int:
        """Return the exit code of a worker, which is killed if it does not exit in the grace period in seconds.

        Raises:
            OSError: The fork server is dead, and with it all workers.
        """
        self._num_workers -= 1
        return self._send_request(b"e", pid, grace)

    def poll_worker(self, pid: int) -> int | None:
        """Return the exit code of a worker, or None if it runs. Do not call it again after an exit code.

        Raises:
            OSError: The fork server is dead, and with it all workers.
        """
        code = self._send_request(b"p", pid)
        if code == _RUNNING:
            return None
        self._num_workers -= 1
        return code

    def close(self) -> None:
        """Stop the fork server and all its workers."""
        self._socket.close()
        self._process.wait()

    def is_alive(self) -> bool:
        """Return whether it answers a request."""
        # A process that was killed has no exit code until the system has freed its memory, so the code says less.
        with suppress(OSError):
            self._send_request(b"i", body=json.dumps([]).encode())
            return True
        return False

    def has_workers(self) -> bool:
        """Return whether there are workers whose exit code was not requested."""
        return self._num_workers > 0

    def _send_request(
        self, what: bytes, pid: int = 0, grace: float = 0.0, descriptors: Sequence[int] = (), body: bytes = b""
    ) -> int:
        with self._lock:
            try:
                # The descriptors of pipes and shared memory travel with the request, because a worker inherits no
                # others from the fork server.
                socket.send_fds(self._socket, [_REQUEST.pack(what, pid, grace, len(body))], descriptors)
                self._socket.sendall(body)
                answer = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
                if len(answer) < _ANSWER.size:
                    raise BrokenPipeError("the fork server is dead")
            except BaseException:
                # Otherwise the answer to an interrupted request would be read as the answer to the next one.
                self._socket.close()
                raise
        return int(_ANSWER.unpack(answer)[0])


# By process id, because a fork of this process inherits the fork servers of its parent; then by the caller's key.
_FORK_SERVERS: dict[tuple[int, str], tuple[Any, ForkServer]] = {}
_CREATION_LOCK = threading.Lock()


def shared_fork_server(
    target: str, preloaded: Sequence[str], environment: Mapping[str, str], version: Any = None
) -> ForkServer:
    """Return the fork server of this process for a target; start one if there is none.

    Args:
        target: As for `ForkServer`, like `preloaded` and `environment`.
        preloaded: The modules that a new fork server imports.
        environment: Environment variables of a new fork server.
        version: A server with another version is replaced, if it has no workers.
    """
    key = os.getpid(), target
    with _CREATION_LOCK:
        found = _FORK_SERVERS.get(key)
        if found is not None:
            is_current = found[0] == version or found[1].has_workers()
            if is_current and found[1].is_alive():
                return found[1]
            found[1].close()
        server = ForkServer(target, preloaded, environment)
        _FORK_SERVERS[key] = version, server
        if found is None:
            atexit.register(_close, key)
        return server


def _close(key: tuple[int, str]) -> None:
    if key[0] == os.getpid():
        _FORK_SERVERS.pop(key)[1].close()


# ------------------------------------------------------------------ in the fork server


def serve(descriptor: int, preloaded: Sequence[str], target: str) -> None:
    """Run the fork server: fork workers until the caller closes the socket or ends."""
    # Only the caller handles Ctrl-C, and then stops the workers.
    ignore_interrupts()
    parent = os.getppid()
    for name in preloaded:
        importlib.import_module(name)
    module, _, function = target.partition(":")
    run_worker = getattr(importlib.import_module(module), function)
    # A garbage collection in a worker would otherwise write to, and so copy, all memory that it shares.
    gc.freeze()
    # The threads of imported libraries are background threads of memory allocators, which handle forks.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

    requests = socket.socket(fileno=descriptor)
    children: set[int] = set()
    while True:
        # The socket stays open after the death of the caller if one of its other child processes has inherited it.
        if not select.select([requests], [], [], _CHECK_EVERY)[0]:
            if os.getppid() != parent:
                break
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST.size, _NUM_DESCRIPTORS)
        if not message:
            break
        what, pid, grace, length = _REQUEST.unpack(message)
        body = requests.recv(length, socket.MSG_WAITALL) if length else b""
        answer = 0
        if what == b"b":
            answer = os.fork()
            # In the child: the socket belongs to the fork server, whose end the caller notices when it is closed
            # everywhere.
            if answer == 0:
                requests.close()
                _run_and_exit(run_worker, descriptors, body)
            children.add(answer)
            # Otherwise the fork server would keep pipes open, and the caller would not notice the end of a worker.
            for each in descriptors:
                os.close(each)
        elif what == b"i":
            _import_modules(json.loads(body))
        else:
            code = _exit_code(pid, grace) if what == b"e" else _poll(pid)
            answer = _RUNNING if code is None else code
            if code is not None:
                children.discard(pid)
        requests.sendall(_ANSWER.pack(answer))
    # The caller has closed the socket or is dead; its workers have nothing to answer to.
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _import_modules(names: Sequence[str]) -> None:
    for name in names:
        # A module that the caller has created or changed: workers import what they need themselves, and report errors.
        with suppress(Exception):
            importlib.import_module(name)
    gc.freeze()


def _exit_code(pid: int, grace: float) -> int:
    deadline = time.monotonic() + grace
    while True:
        code = _poll(pid)
        if code is not None:
            return code
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.002)


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _run_and_exit(
    run_worker: Callable[[Sequence[int], Mapping[str, Any]], None], descriptors: Sequence[int], body: bytes
) -> None:
    """Run a worker, and exit the process."""
    code = 1
    try:
        end_with_parent(os.getppid(), signal.SIGKILL)()
        run_worker(descriptors, json.loads(body))
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
