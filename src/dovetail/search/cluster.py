"""Ray backend of experiments: trials on the nodes of a Ray cluster.

Every attempt has a keeper: a named actor on a node with free slots, which outlives the process that started it. The
keeper starts the attempt on its node as `LocalBackend` does on this machine, so the files of an attempt are the same as
on one machine; all nodes share the folder of the experiment. Ray also reports that a node is lost, which files cannot.

    runner ── RayBackend ──▷ keeper (actor) ──▷ sh ──▷ the script
                                └ guard: kills the rest of the attempt if the keeper dies

A trial whose slots are on several nodes has a keeper without a slot: see `dovetail.search.spread`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from dovetail.errors import ConfigError, DovetailError
from dovetail.runtime.ray_cluster import NAMESPACE, connect
from dovetail.search.checkpoints import latest_checkpoint
from dovetail.search.failures import append_to_log
from dovetail.search.processes import Attempt, Backend, Ended, LocalBackend
from dovetail.search.secrets import masked_url, write_private
from dovetail.search.spread import is_spreadable, spread
from dovetail.search.storage import open_file_system, pull, push

_EVERY = 0.05
# Seconds for which the list of nodes is cached.
_REMEMBERED = 2.0
# Seconds that a guard has to kill the processes of a dead keeper.
_SETTLING = 1.0
_COPIED_EVERY = 2.0
# Seconds after which an unused keeper exits: its runner may be dead.
_PATIENCE = 60.0
# Seconds for which the head may be unreachable. Ray itself ends this process after a minute.
_ABSENCE = 20.0


class ClusterLostError(DovetailError):
    """The head of a cluster cannot be reached, so the state of its trials is unknown."""


class RayBackend(Backend):
    """Runs trials on the nodes of a Ray cluster.

    A slot is a graphics card if the cluster has any, else a CPU core. The folder of experiments, the code and Python's
    packages have the same path on all nodes. A process stays connected to its first cluster.

    Args:
        address: `local` starts a cluster on this machine that ends with this process. `ray` or `auto` is the cluster
            that this machine is a node of, `host:port` is its address, and `ray://host:port` connects from outside.
        storage: The URL, for fsspec, to which checkpoints are copied as in `dovetail.search.storage`; None means none.

    Raises:
        ConfigError: There is no cluster at the address.
        ClusterLostError: Raised by methods when the cluster no longer exists.
        MissingExtraError: Ray, or the package for such a URL, is not installed.

    Example:
        >>> RayBackend("nowhere")
        Traceback (most recent call last):
            ...
        dovetail.errors.ConfigError: cluster: expected local, ray, host:port or ray://host:port, got 'nowhere'
    """

    def __init__(self, address: str, storage: str | None = None) -> None:
        if not re.fullmatch(r"local|ray|auto|(ray://)?[^/:\s]+:\d+", address):
            raise ConfigError(f"cluster: expected local, ray, host:port or ray://host:port, got {address!r}")
        if storage is not None:
            open_file_system(storage)
        self._storage = storage
        self._ray = connect("auto" if address == "ray" else address)
        is_outside = address.startswith("ray://")
        self._head = address.removeprefix("ray://") if is_outside else _cluster_address()
        self._head_seen = time.monotonic()
        self._new_keeper = self._ray.remote(_Keeper)
        self._keepers: dict[Path, _Keeping] = {}
        self._rooms: tuple[float, list[int]] = (-_REMEMBERED, [])
        self._resource = "CPU"

    def capacity(self, slots: int) -> int:
        self._see_head()
        rooms = self._slots_of_nodes()
        # Trials that fit on one node each. Only if none fits, trials are spread over nodes and slots are summed.
        whole = sum(room // slots for room in rooms)
        return max(1, whole or sum(rooms) // slots)

    def start(self, attempt: Attempt, command: Sequence[str], env: Mapping[str, str], cwd: Path, slots: int) -> None:
        """Start an attempt; do nothing if it was started before.

        If no node has enough slots, Ray Train spreads the processes of the trial over several nodes.

        Raises:
            ConfigError: The command cannot be spread.
        """
        rooms = self._slots_of_nodes()
        wanted = {self._resource: slots}
        if max(rooms, default=0) < slots and (slots <= sum(rooms) or is_spreadable(command)):
            # Also if nodes may still join, because no single node may ever have enough slots.
            wanted, command = {}, spread(command, slots, self._resource)
        attempt.folder.parent.mkdir(parents=True, exist_ok=True)
        if slots > sum(rooms):
            append_to_log(attempt.trial, f"waiting for {slots} slots: the cluster has {sum(rooms)}")
        options = {
            "name": _name(attempt),
            "namespace": NAMESPACE,
            # The keeper and its trial continue if this runner is killed; the next runner finds the keeper by name.
            "lifetime": "detached",
            # If several processes start the same attempt, one of them creates the keeper for all.
            "get_if_exists": True,
            "num_cpus": wanted.get("CPU", 0),
            "num_gpus": wanted.get("GPU", 0),
        }
        keeper = self._new_keeper.options(**options).remote(str(attempt.folder))
        work = _Work(list(command), sys.executable, dict(env), str(cwd), slots, self._place(attempt))
        over = keeper.run.remote(work)
        self._keepers[attempt.folder] = _Keeping(keeper, over)

    def poll(self, attempt: Attempt) -> Ended | None:
        """Return how an attempt ended; None while it runs or starts.

        An attempt that ended without an exit code was killed, or its node was lost; the trial's log has the reason.
        """
        self._see_head()
        ended: Ended | None = Ended(attempt.exit_code)
        if attempt.exit_code != 0 or self._storage is not None:
            # The keeper's result arrives later than the file: after the last process of a group has exited, and after
            # the last checkpoint is copied.
            ended = self._ended(attempt)
        if ended is None:
            return None
        # The keeper was lost, but the shell of the attempt may have written the exit code before.
        if ended.code is None:
            ended = Ended(attempt.exit_code)
        keeping = self._keepers.pop(attempt.folder, None) or self._found(attempt)
        if keeping is not None:
            self._ray.kill(keeping.keeper)
        place = self._place(attempt)
        # If the trial's folder has no checkpoint left, the copies let the next attempt resume.
        if place is not None and ended.code != 0 and latest_checkpoint(attempt.trial) is None:
            pull(place, attempt.trial)
        return ended

    def stop(self, attempt: Attempt, kill: bool = False) -> None:
        keeping = self._keeping(attempt)
        if keeping is None:
            return
        if not (attempt.folder / "wrapper").exists():
            # It still waits for free slots, and would continue to wait until other trials end.
            self._ray.kill(keeping.keeper)
        elif keeping.stopping is None or self._is_ready(keeping.stopping):
            keeping.stopping = keeping.keeper.stop.remote(kill)

    def adopt(self, attempt: Attempt) -> bool:
        return attempt.has_started

    # ------------------------------------------------------------------ inside

    def _see_head(self) -> None:
        """Raise if the head is unreachable; otherwise a call of Ray would wait for it and then end this process."""
        if time.monotonic() - self._head_seen < _REMEMBERED:
            return
        host, _, port = self._head.rpartition(":")
        deadline = time.monotonic() + _ABSENCE
        while True:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_REMEMBERED).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterLostError(
                        f"cluster: the head of the cluster at {self._head} has not responded for {_ABSENCE:.0f} s: "
                        "resume the experiment when a cluster is available again"
                    ) from error
            time.sleep(_EVERY)
        self._head_seen = time.monotonic()

    def _slots_of_nodes(self) -> list[int]:
        seen, rooms = self._rooms
        if time.monotonic() - seen > _REMEMBERED:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            self._resource = "GPU" if any(node.get("GPU") for node in nodes) else "CPU"
            rooms = [int(node.get(self._resource, 0)) for node in nodes]
            self._rooms = time.monotonic(), rooms
        return rooms

    def _place(self, attempt: Attempt) -> str | None:
        """Return the URL that the checkpoints of this trial are copied to, which no other trial uses."""
        if self._storage is None:
            return None
        trial = attempt.trial
        written = trial / "storage"
        if not written.exists():
            trial.mkdir(parents=True, exist_ok=True)
            unfinished = trial / "storage.tmp"
            # A URL may contain a password.
            write_private(unfinished, f"{self._storage.rstrip('/')}/{trial.name}-{token_hex(4)}")
            unfinished.replace(written)
        return written.read_text()

    def _keeping(self, attempt: Attempt) -> _Keeping | None:
        keeping = self._keepers.get(attempt.folder) or self._found(attempt)
        if keeping is not None:
            self._keepers[attempt.folder] = keeping
        return keeping

    def _found(self, attempt: Attempt) -> _Keeping | None:
        # Ray raises this if no actor has the name.
        with suppress(ValueError):
            keeper = self._ray.get_actor(_name(attempt), namespace=NAMESPACE)
            return _Keeping(keeper, keeper.wait.remote())
        return None

    def _ended(self, attempt: Attempt) -> Ended | None:
        keeping = self._keeping(attempt)
        if keeping is None:
            if attempt.exit_code is None and attempt.exit_request is None:
                append_to_log(attempt.trial, f"attempt {attempt.number} no longer exists on the cluster")
            return Ended(None)
        if not self._is_ready(keeping.over):
            return None
        errors = self._ray.exceptions
        try:
            ended: Ended = self._ray.get(keeping.over)
        except errors.ActorUnavailableError:
            # The network failed; the keeper may still be alive.
            keeping.over = keeping.keeper.wait.remote()
            return None
        except errors.RayError as error:
            if keeping.lost_at is None:
                keeping.lost_at = time.monotonic()
                if attempt.exit_code is None and attempt.exit_request is None:
                    append_to_log(attempt.trial, _reason(attempt, error))
            return Ended(None) if time.monotonic() - keeping.lost_at > _SETTLING else None
        return ended

    def _is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])


@dataclass
class _Keeping:
    """A keeper and its pending results: `over` is ready when the attempt has ended or the keeper is dead."""

    keeper: Any
    over: Any
    stopping: Any = None
    lost_at: float | None = None


@dataclass(frozen=True)
class _Work:
    """The job of a keeper: `python` is the runner's interpreter, `storage` the URL for checkpoints."""

    command: list[str]
    python: str
    env: dict[str, str]
    cwd: str
    slots: int
    storage: str | None


class _Keeper:
    """Actor that starts an attempt on its node and waits for its end."""

    def __init__(self, folder: str) -> None:
        self._attempt = Attempt(Path(folder))
        self._backend = LocalBackend()
        self._work: _Work | None = None
        self._copying = asyncio.Lock()
        self._leaving = self._leave_after(_PATIENCE)

    async def run(self, work: _Work) -> Ended:
        """Start the attempt, unless it has started, and return how it ended."""
        if self._work is None:
            self._work = work
            self._leaving.cancel()
            # Python may have a different path on this node.
            command = [sys.executable if word == work.python else word for word in work.command]
            env = {**work.env, "RAY_ADDRESS": _cluster_address()}
            self._guard = start_guard(self._attempt)
            self._backend.start(self._attempt, command, env, Path(work.cwd), work.slots)
        return await self.wait()

    async def wait(self) -> Ended:
        """Return how the attempt ended."""
        if self._work is None:
            return Ended(None)
        copied = time.monotonic()
        while (ended := self._backend.poll(self._attempt)) is None:
            await asyncio.sleep(_EVERY)
            if time.monotonic() - copied > _COPIED_EVERY:
                await self._copy(self._work.storage)
                copied = time.monotonic()
        await self._copy(self._work.storage)
        self._leaving.cancel()
        self._leaving = self._leave_after(_PATIENCE)
        return ended

    def stop(self, kill: bool) -> None:
        """Send SIGTERM to the command, or kill all processes at once."""
        self._backend.stop(self._attempt, kill)

    async def _copy(self, storage: str | None) -> None:
        """Copy new checkpoints; log an error, so that the next call tries again."""
        if storage is None:
            return
        async with self._copying:
            try:
                await asyncio.to_thread(push, self._attempt.trial, storage)
            except Exception as error:  # each kind of storage has its own errors
                why = f"{type(error).__name__}: {masked_url(str(error))}"
                append_to_log(self._attempt.trial, f"checkpoints could not be copied: {why}")

    def _leave_after(self, seconds: float) -> threading.Timer:
        # A runner kills the keepers of ended attempts. The keepers of a dead runner would otherwise hold their slots.
        timer = threading.Timer(seconds, os._exit, [0])
        timer.daemon = True
        timer.start()
        return timer


def start_guard(attempt: Attempt, group: int | None = None) -> subprocess.Popen[bytes]:
    """Start a process that kills an attempt, or a group of processes, as soon as this process is dead.

    It exits without killing anything if something is written to it.
    """
    command = [sys.executable, "-m", "dovetail.search.cluster", str(attempt.folder), str(group or 0)]
    guard = subprocess.Popen(  # noqa: S603 - this program
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    guard.wait()
    return guard


def main(arguments: Sequence[str]) -> int:
    """Run the process that `start_guard` starts, with the folder of an attempt and a group of processes or 0."""
    # Fork twice, because Ray kills the children of an actor together with it.
    if os.fork():
        return 0
    # The kernel closes the other end of the pipe when the parent ends.
    if not sys.stdin.read():
        folder, group = arguments
        if int(group):
            with suppress(ProcessLookupError):
                os.killpg(int(group), signal.SIGKILL)
        else:
            LocalBackend().stop(Attempt(Path(folder)), kill=True)
    return 0


def _cluster_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _name(attempt: Attempt) -> str:
    place = sha256(str(attempt.trial).encode()).hexdigest()[:12]
    return f"{attempt.trial.name}-{place}-{attempt.number}"


def _reason(attempt: Attempt, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if not attempt.has_started:
        return f"attempt {attempt.number} could not start on its node: {lines[-1]}"
    why = next((line for line in lines if re.match("The actor (died|is dead) because", line)), lines[-1])
    return f"the node of attempt {attempt.number} was lost ({why.partition(' because ')[2].partition('. ')[0] or why})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
