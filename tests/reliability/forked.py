"""Separate Python processes that start with torch imported, which takes four seconds in a new interpreter.

`python forked.py DESCRIPTOR` is a server: it imports what most scripts need, and forks for every request that comes in
at a socket. A process that it forks is one like any other, with its own arguments, variables, folder, output, number,
session, and the end that Python gives to every script; only its parent is not the process that requested it.

A fork cannot replace a new interpreter in every case: one with other options, or with variables that count at the start
of Python or torch. With `DOVETAIL_TORTURE=1`, everything is.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from unittest.mock import patch

# Optimizers import the third one, in half of the start time of a script.
PRELOADED = ("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "sklearn.datasets", "dovetail.trainers")

_FORKS = sys.platform == "linux" and os.environ.get("DOVETAIL_TORTURE") != "1"

# Prefixes of variables that Python, torch or their libraries read when they start, and the ones that they do not, or
# that a fork can still follow.
_EARLY = ("LD_", "MKL_", "OMP_", "PYTHON", "TORCH_")
_LATE = {"PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}


def run(script: Path, *arguments: object, folder: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, with warnings as errors, and return its exit code and what it said."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start(script, *arguments, folder=folder, stdout=output, stderr=errors)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess([script, *arguments], code, output.read(), errors.read())


def start(
    script: Path,
    *arguments: object,
    folder: Path,
    stdin: IO[Any] | int = subprocess.DEVNULL,
    stdout: IO[Any] | int,
    stderr: IO[Any] | int,
    variables: Mapping[str, str] | None = None,
) -> Python:
    """Start a script in a folder, with warnings as errors and more environment variables than this process has.

    Its channels are open files, or `subprocess.PIPE`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    command = [sys.executable, "-W", "error", *map(str, (script, *arguments))]
    return Python(command, bufsize=0, cwd=folder, env=environment, stdin=stdin, stdout=stdout, stderr=stderr)


@contextmanager
def forking() -> Iterator[None]:
    """Fork every Python that is started in this block, also by torch's agent, and every one that those start."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    with patch.object(subprocess, "Popen", Python), patch.object(subprocess_handler, "Popen", Python):
        yield


class Python(subprocess.Popen[Any]):
    """A process that the server forks, if its command is Python. The overridden attributes are private, and old."""

    # Says the number of the process, and its exit code when it has ended. None if it is no fork.
    _told: IO[bytes] | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *given: Any) -> None:
        pass_fds, cwd, env, _, _, shell, *pipes = given[:12]
        environment = dict(os.environ if env is None else env)
        task = None if executable or preexec_fn or shell else _task(args)
        if task is None or _early(environment) != _server().variables:
            super()._execute_child(args, executable, preexec_fn, close_fds, *given)
            return
        task |= {"folder": os.path.abspath(cwd or "."), "environment": environment, "in_new_session": given[17]}
        task["passed"] = [0, 1, 2, *pass_fds]
        channels = [pipe if pipe >= 0 else number for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        reported, telling = os.pipe()
        self._told = os.fdopen(reported, "rb", buffering=0)
        requests = _server().requests
        # One that is to fork gets the socket as well.
        asking = [requests.fileno()] if subprocess.Popen is Python else []
        socket.send_fds(requests, [json.dumps(task).encode()], [telling, *channels, *pass_fds, *asking])
        os.close(telling)
        self._close_pipe_fds(*pipes)
        self._child_created = True
        self.pid = self._number()

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self._told is None:
            return super()._internal_poll(*given, **more)
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._told is None:
            return super()._wait(timeout)
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number()
            self._told.close()
        return self.returncode

    def _number(self) -> int:
        assert self._told is not None
        line = self._told.readline()
        assert line, "the server of processes is dead"
        return int(line)


def _task(command: Any) -> dict[str, Any] | None:
    """Return what a command makes Python do, if a fork can do it, too."""
    if not _FORKS or isinstance(command, (str, bytes, os.PathLike)):
        return None
    executable, *words = [os.fspath(word) for word in command]
    is_unbuffered, is_strict = "-u" in words[:1], "-W" in words[:1] and "error" in words[1:2]
    words = words[is_unbuffered + 2 * is_strict :]
    how = words.pop(0) if words[:1] in (["-m"], ["-c"]) else ""
    if executable != sys.executable or not words or (not how and words[0].startswith("-")):
        return None
    return {"is_unbuffered": is_unbuffered, "is_strict": is_strict, "how": how, "what": words[0], "given": words[1:]}


def _early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(_EARLY) and name not in _LATE}


@dataclass(frozen=True)
class _Server:
    requests: socket.socket
    variables: Mapping[str, str]


# The server of this process, or of the process that requested this one.
_SERVERS: list[_Server] = []
_MAKING = threading.Lock()


def _server() -> _Server:
    """Return the server of this process, which ends with it."""
    with _MAKING:
        if not _SERVERS:
            _SERVERS.append(_make_server())
        return _SERVERS[0]


def _make_server() -> _Server:
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with theirs:
        command = [sys.executable, "-W", "error", __file__, str(theirs.fileno())]
        process = _Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)

    def close() -> None:
        # Closing the socket is not enough: a client process may still be running.
        with requests, process:
            process.kill()

    atexit.register(close)
    return _Server(requests, _early(environment))


# The original, before any test replaces it.
_Popen = subprocess.Popen


# ------------------------------------------------------------------ in the server


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork until there are no more requests; return in the new processes only, with what was asked for."""
    for name in PRELOADED:
        importlib.import_module(name)
    # A process that ends looks through all that it has for garbage, but not through this: a second less for each.
    gc.collect()
    gc.freeze()
    # The intermediate processes are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 16)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    telling = descriptors[0]
    if pid := os.fork():
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        os.write(telling, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(telling, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    task: dict[str, Any] = json.loads(message)
    # Out of the way of the numbers that they are to get.
    ours = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(ours[1:], task["passed"], strict=False):
        os.dup2(descriptor, number)
    if len(ours) > 1 + len(task["passed"]):
        _SERVERS.append(_Server(socket.socket(fileno=ours.pop()), _early(os.environ)))
        # Otherwise Python may warn of an open socket when it ends.
        atexit.register(_SERVERS[0].requests.close)
    for descriptor in ours:
        os.close(descriptor)
    return task


def _start(task: dict[str, Any]) -> None:
    """Be as a new interpreter is."""
    if task["in_new_session"]:
        os.setsid()
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(task["environment"])
    os.chdir(task["folder"])
    sys.argv = [task["how"] or task["what"], *task["given"]]
    if (path := os.environ.get("PYTHONPATH", "")) != before:
        old, new = ([os.path.abspath(it) for it in each.split(os.pathsep) if it] for each in (before, path))
        sys.path[1:] = [*new, *(it for it in sys.path[1:] if it not in old)]
    if task["is_unbuffered"] or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), sys.stdout.encoding, write_through=True)
    if not task["is_strict"]:
        sys.warnoptions.remove("error")
        warnings.filters.remove(("error", None, Warning, None, 0))
    # Forks have numpy's generator in the same state. Python's generator is reseeded, and torch's starts equally anyway.
    importlib.import_module("numpy").random.seed()


def _become(what: str, how: str) -> None:
    """Run a script, a module after `-m` or code after `-c` as Python does."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if how == "-m":
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(what)
    elif how == "-c":
        sys.path[0] = ""
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(what))
        main.__file__ = what
        exec(compile(Path(what).read_bytes(), what, "exec"), vars(main))


if __name__ == "__main__":
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    _start(asked)
    with forking() if _SERVERS else nullcontext():
        _become(asked["what"], asked["how"])
