"""Scripts in processes of their own that begin with torch imported, which takes four seconds in a new interpreter.

`python forked.py DESCRIPTOR` is a server: it imports what most scripts need, and forks for every request that comes in
at a socket. A process that it forks is one like any other, with its own arguments, variables, folder, output, number,
and the end that Python gives to every script. `DOVETAIL_TORTURE=1` takes a new interpreter for each instead.
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
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

# Optimizers import the third one, in half of all the time that a script takes to begin.
PRELOADED = ("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "sklearn.datasets", "dovetail.trainers")

_FORKS = sys.platform == "linux" and os.environ.get("DOVETAIL_TORTURE") != "1"


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
) -> subprocess.Popen[bytes] | Forked:
    """Start a script in a folder, with warnings as errors and more environment variables than this process has.

    Its channels are open files, or `subprocess.PIPE`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    words = [str(word) for word in (script, *arguments)]
    if not _FORKS:
        command = [sys.executable, "-W", "error", *words]
        return subprocess.Popen(command, cwd=folder, env=environment, stdin=stdin, stdout=stdout, stderr=stderr)
    return Forked({"arguments": words, "folder": str(folder), "environment": environment}, [stdin, stdout, stderr])


class Forked:
    """A process that the server forks, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, request: dict[str, Any], channels: Sequence[IO[Any] | int]) -> None:
        ours: list[IO[bytes] | None] = []
        with ExitStack() as theirs:
            descriptors = []
            for number, channel in enumerate(channels):
                if channel == subprocess.PIPE:
                    reading, writing = os.pipe()
                    ends = os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0)
                    descriptors.append(theirs.enter_context(ends[number > 0]).fileno())
                    ours.append(ends[number == 0])
                else:
                    file = theirs.enter_context(open(os.devnull, "rb")) if isinstance(channel, int) else channel
                    descriptors.append(file.fileno())
                    ours.append(None)
            told, telling = os.pipe()
            theirs.callback(os.close, telling)
            socket.send_fds(_server(), [json.dumps(request).encode()], [*descriptors, telling])
        self.stdin, self.stdout, self.stderr = ours
        self.returncode: int | None = None
        self._told = os.fdopen(told, "rb", buffering=0)
        self.pid = self._number()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in (self.stdin, self.stdout, self.stderr):
            if channel is not None:
                channel.close()
        self.wait()

    def communicate(self, given: bytes | None = None) -> tuple[bytes, bytes]:
        """Say something, and return what the process says until its end, which is no more than a pipe can hold."""
        if self.stdin is not None and not self.stdin.closed:
            self.stdin.write(given or b"")
            self.stdin.close()
        said = [b"" if channel is None else channel.read() for channel in (self.stdout, self.stderr)]
        self.wait()
        return said[0], said[1]

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = self._number()
            self._told.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        line = self._told.readline()
        assert line, "the server of processes is dead"
        return int(line)


@cache
def _server() -> socket.socket:
    """Return the socket of this process's server, which ends with it."""
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-W", "error", __file__, str(theirs.fileno())]
        server = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL
        )

    def close() -> None:
        requests.close()
        server.wait()

    atexit.register(close)
    return requests


# ------------------------------------------------------------------ in the server


def _serve(requests: socket.socket) -> None:
    """Fork until there are no more requests; return in the new processes only, as what was asked for."""
    for name in PRELOADED:
        importlib.import_module(name)
    # A process that ends looks through all that it has for garbage, but not through this: a second less for each.
    gc.collect()
    gc.freeze()
    # Nobody waits for the processes that wait for the others.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    *channels, telling = descriptors
    if pid := os.fork():
        for channel in channels:
            os.close(channel)
        os.write(telling, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(telling, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    for number, channel in enumerate(channels):
        os.dup2(channel, number)
    for descriptor in descriptors:
        os.close(descriptor)
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    # Forks have numpy's generator in the same state. That of Python is seeded anew, and torch's begins equally anyway.
    importlib.import_module("numpy").random.seed()


def _become(script: str) -> None:
    """Run a script as `python SCRIPT` does."""
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(sys.argv[0])
