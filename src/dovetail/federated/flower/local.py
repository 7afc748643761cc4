"""Local Flower deployment: a SuperLink and SuperNodes on this machine, stopped after use."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from dovetail.errors import DovetailError
from dovetail.runtime.processes import end_with_parent

_HOST = "127.0.0.1"
_PATIENCE = 120.0
# No telemetry, and tasks start without delay.
_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}


class LocalFlower:
    """Context manager that runs Flower's processes on this machine, reachable only from it, and stops them at exit.

    Args:
        folder: The folder of Flower's files and of the logs: `superlink.log`, `supernode-0.log`, `run.log`.
        num_nodes: The number of SuperNodes, also their `num-partitions`; their `partition-id` counts from 0.

    Attributes:
        nodes: The processes of the SuperNodes.

    Example:
        >>> LocalFlower(Path("flower"), num_nodes=2).num_nodes
        2
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.num_nodes = folder, num_nodes
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LocalFlower:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def submit(self, app: Path) -> subprocess.Popen[bytes]:
        """Run an app, and return the process that streams its output to `run.log`."""
        return self._begin("run", "flwr", "run", str(app), "here", "--stream")

    def check(self) -> None:
        """Raise if the SuperLink has ended.

        Raises:
            DovetailError: The message has the last lines of its log.
        """
        link = self._processes[0]
        if link.poll() is not None:
            raise DovetailError(
                f"the SuperLink ended with exit code {link.returncode}: {self.last_output('superlink')}"
            )

    def last_output(self, name: str) -> str:
        """Return the last lines of a log."""
        return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-20:])

    def _node_command(self) -> list[str]:
        return ["flower-supernode"]

    def _start(self) -> None:
        address = f"{_HOST}:{_free_port()}"
        self._home = self.folder / "home"
        self._home.mkdir(exist_ok=True)
        connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        (self._home / "config.toml").write_text(connection, encoding="utf-8")
        port = address.partition(":")[2]
        # Apps run in this Python environment, so Flower must not install their dependencies.
        options = ["--insecure", "--host", _HOST, "--port", port, "--disable-runtime-dependency-installation"]
        self._begin("superlink", "flower-superlink", *options)
        self._wait_for(int(port))
        for number in range(self.num_nodes):
            config = f"partition-id={number} num-partitions={self.num_nodes}"
            options = ["--insecure", "--superlink", address, "--host", _HOST, "--port", str(_free_port())]
            self.nodes.append(
                self._begin(f"supernode-{number}", *self._node_command(), *options, "--node-config", config)
            )

    def _begin(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        # Flower's commands are beside the interpreter, also if its environment is not activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environment = {**os.environ, **_ENVIRONMENT, "FLWR_HOME": str(self._home), "PATH": path}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - Flower's own commands
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid(), signal.SIGTERM),
            )
        self._processes.append(process)
        return process

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            # Otherwise a SuperLink that fails at once, for example because the port was taken, would be waited for.
            self.check()
            with suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
                return
            if time.monotonic() > deadline:
                raise DovetailError(
                    f"the SuperLink does not answer after {_PATIENCE:g} seconds: {self.last_output('superlink')}"
                )
            time.sleep(0.1)

    def _end(self) -> None:
        # Each process leads a session that includes the processes of its apps. They have no state to save.
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()
        self.nodes.clear()


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as free:
        port: int = free.getsockname()[1]
        return port
