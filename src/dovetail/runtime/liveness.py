"""Detection of stopped, silent and late processes of a group, by two threads in every process."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import sysconfig
import threading
from contextlib import suppress
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch.distributed as dist

from dovetail.errors import ConfigError

_logger = logging.getLogger("dovetail.distributed")
# Seconds between two checks.
_TICK = 0.5
# Seconds for a late process of another machine to end itself.
_GRACE = 2.0
# Seconds for the store to accept the report about a process; the store may be a thread of the stopped process.
_PATIENCE = 0.5
# Folders whose functions do not describe what a user's program computes.
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN_FOLDER = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Limits:
    """Seconds until a process that does not take part is reported, or ends the run; 0 means never.

    Attributes:
        stopped: A process of this machine that a signal has stopped (SIGSTOP, SIGTSTP) is killed, which ends the run.
            A process that a debugger holds is not stopped in this sense.
        silent: A process of another machine that shows no sign of life ends the run.
        late: A process that has not arrived at a collective call is named in the log. This ends nothing.
        overdue: A process that has not arrived at a collective call ends the run. By default never, because slow data
            is not an error.

    Example:
        >>> Limits(late=60).late
        60
    """

    stopped: float = 4.0
    silent: float = 60.0
    late: float = 10.0
    overdue: float = 0.0

    @classmethod
    def from_environment(cls) -> Limits:
        """Return the limits of the environment variables, such as `DOVETAIL_STOPPED_SECONDS`."""
        given = {}
        for each in fields(cls):
            variable = f"DOVETAIL_{each.name.upper()}_SECONDS"
            text = os.environ.get(variable, "")
            if text:
                try:
                    given[each.name] = float(text)
                except ValueError:
                    given[each.name] = -1.0
                if not 0 <= given[each.name] < float("inf"):
                    raise ConfigError(f"{variable}: expected a number of seconds, or 0 for no limit, got {text!r}")
        return cls(**given)


def own_address() -> str:
    """Return the machine and the number of this process, for `Watch`."""
    # Numbers of processes are valid in one namespace only; containers of a machine may share their host name.
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return json.dumps({"host": socket.gethostname(), "space": space, "pid": os.getpid()})


def neighbour(address: str) -> int | None:
    """Return the number of a process from its `own_address`; None if it is not a process of this machine."""
    own, other = json.loads(own_address()), json.loads(address)
    is_here = all(own[name] == other.get(name) for name in ("host", "space"))
    return int(other["pid"]) if is_here else None


class Watch:
    """Watches the processes of a group until it is closed.

    One thread writes a beat to the store every half second, with the number of collective calls that the process has
    started, and reads the beats of other processes. The other thread reads the states of this machine's processes from
    the operating system. It needs no store, because the store may be a thread of a stopped process. Both count their
    own turns and not the time, so nothing is reported when the whole group was paused.

    Args:
        store: The store of the group, in which every process has written `own_address` as `at/RANK`.
        rank: The rank of this process.
        size: The number of processes.
        limits: The limits; None means the ones of the environment.

    Attributes:
        problem: A sentence about the process that ends the run, or None.
    """

    def __init__(self, store: Any, rank: int, size: int, limits: Limits | None = None) -> None:
        self.problem: str | None = None
        # A connection of its own: another call of this process may wait for a key for minutes. Torch 2.6 has none.
        clone = getattr(store, "clone", None)
        self._store = store if clone is None else clone()
        self._rank, self._size, self._pid = rank, size, os.getpid()
        self._limits = Limits.from_environment() if limits is None else limits
        self._is_over = threading.Event()
        self._addresses: list[dict[str, Any]] = []
        self._here: set[int] = set()
        self._neighbours: dict[int, psutil.Process] = {}
        self._num_beats = 0
        self._is_beating = True
        # The thread that trains, for the report where it is.
        self._observed = threading.get_ident()
        self._store.set(f"beat/{rank}", json.dumps({"beat": 0, "calls": 0, "place": ""}))
        for target in (self._beat, self._check):
            threading.Thread(target=target, name=f"dovetail-{target.__name__}", daemon=True).start()

    def close(self) -> None:
        """Stop watching, and report to the other processes that this one has left the group."""
        # A forked process has the object, but neither its threads nor a connection of its own.
        if not self._is_over.is_set() and self._pid == os.getpid():
            self._is_over.set()
            self._in_time(lambda: self._store.set(f"left/{self._rank}", ""))

    def name(self, rank: int) -> str:
        """Return a rank with its machine and its process."""
        if not self._addresses:
            return f"rank {rank}"
        return f"rank {rank} ({self._addresses[rank]['host']}, process {self._addresses[rank]['pid']})"

    # ------------------------------------------------------------------ through the store

    def _beat(self) -> None:
        try:
            self._meet()
            turns = _Turns(self._limits)
            while not self._is_over.wait(_TICK):
                self._num_beats += 1
                turns.count(_num_collective_calls())
                place = _place(self._observed) if turns.is_half_late else ""
                beat = {"beat": self._num_beats, "calls": turns.calls, "place": place}
                self._store.set(f"beat/{self._rank}", json.dumps(beat))
                if turns.is_report_due():
                    self._report_late(turns)
                if turns.is_overdue:
                    self._end_overdue(turns)
                self._check_own_end()
                self._check_other_machine(turns)
        except Exception:
            # The store has ended, and with it the run.
            self._is_beating = False

    def _meet(self) -> None:
        """Read where the processes are."""
        texts = self._read_all("at")
        for rank, pid in enumerate(map(neighbour, texts)):
            if pid is not None and rank != self._rank:
                with suppress(psutil.Error):
                    self._neighbours[rank] = psutil.Process(pid)
            if pid is not None:
                self._here.add(rank)
        self._addresses = [json.loads(text) for text in texts]

    def _report_late(self, turns: _Turns) -> None:
        """Log the late processes."""
        if late := self._late(turns):
            _logger.warning(
                "rank %d has waited %.0f s for the other processes; not arrived: %s",
                self._rank,
                turns.num_waiting * _TICK,
                ", ".join(late.values()),
            )

    def _late(self, turns: _Turns) -> dict[int, str]:
        """Return the processes that have made fewer collective calls than this one, with the lines that they execute.

        Only one of the waiting processes receives them.
        """
        beats = list(map(json.loads, self._read_all("beat")))
        calls = [beat["calls"] for beat in beats]
        late = [rank for rank, number in enumerate(calls) if number < turns.calls and not self._has_left(rank)]
        if calls.index(max(calls)) != self._rank:
            return {}
        return {rank: f"{self.name(rank)} {beats[rank]['place']}".strip() for rank in late}

    def _end_overdue(self, turns: _Turns) -> None:
        """End the late processes: their connections close, and the other processes exit with their names."""
        late = self._late(turns)
        if not late or self._is_over.is_set():
            return
        limit = self._limits.overdue
        problem = (
            f"{' and '.join(late.values())} did not arrive at a collective call within {limit:g} s, so the run ends; "
            "DOVETAIL_OVERDUE_SECONDS sets this limit, and 0 waits"
        )
        if self.problem is not None and turns.num_waiting * _TICK >= limit + _GRACE:
            # A process of another machine does not end itself while a function of another language blocks its threads.
            self._give_up(min(late), problem)
        # Before the end, because the collective calls of all processes fail at once.
        self.problem = problem
        for rank in late:
            self._store.set(f"late/{rank}", problem)
        for rank in late:
            if process := self._neighbours.pop(rank, None):
                with suppress(psutil.Error):
                    process.kill()

    def _check_own_end(self) -> None:
        """End this process if one of another machine has found it late."""
        if self._limits.overdue and self._store.check([f"late/{self._rank}"]):
            self._give_up(self._rank, self._store.get(f"late/{self._rank}").decode())

    def _check_other_machine(self, turns: _Turns) -> None:
        """Check the previous rank, if it runs on another machine. Its own machine checks the others there."""
        before = (self._rank - 1) % self._size
        if not self._limits.silent or before in self._here:
            return
        seen = json.loads(self._store.get(f"beat/{before}"))["beat"]
        if turns.is_silent(seen) and not self._has_left(before):
            self._give_up(before, f"{self.name(before)} has shown no sign of life for {self._limits.silent:g} s")

    def _read_all(self, word: str) -> list[str]:
        """Return the values that all processes have written under a word, by rank."""
        keys = [f"{word}/{rank}" for rank in range(self._size)]
        # One request, if the store supports it: a thousand processes read a thousand keys.
        has_one = self._store.has_extended_api()
        return [value.decode() for value in (self._store.multi_get(keys) if has_one else map(self._store.get, keys))]

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.check([f"left/{rank}"]))

    # ------------------------------------------------------------------ through the operating system

    def _check(self) -> None:
        num_stopped: dict[int, int] = {}
        num_beats, num_silent = 0, 0
        while not self._is_over.wait(_TICK):
            for rank, process in list(self._neighbours.items()):
                num_stopped[rank] = num_stopped.get(rank, 0) + 1 if _is_stopped(process) else 0
                if self._limits.stopped and num_stopped[rank] * _TICK >= self._limits.stopped:
                    del self._neighbours[rank]
                    self._end_stopped(rank, process)
            num_silent = num_silent + 1 if self._num_beats == num_beats and self._is_beating else 0
            num_beats = self._num_beats
            if self._limits.silent and num_silent * _TICK >= self._limits.silent and self._is_store_elsewhere():
                self._give_up(
                    0, f"{self.name(0)}, which hosts the store, has not answered for {self._limits.silent:g} s"
                )

    def _is_store_elsewhere(self) -> bool:
        """Return whether the store is in the first process, on another machine."""
        # A launcher that hosts the store may be suspended in its shell while its workers continue.
        hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return bool(self._addresses) and not hosted_by_launcher and 0 not in self._here

    def _end_stopped(self, rank: int, process: psutil.Process) -> None:
        """Kill a process that a signal has stopped: its connections close, and the other processes exit with its name.

        A collective call cannot be cancelled from outside, and a stopped process would not end by itself.
        """
        problem = (
            f"{self.name(rank)} was stopped by a signal such as SIGSTOP for {self._limits.stopped:g} s, so it was "
            "killed and the run ends; DOVETAIL_STOPPED_SECONDS sets this limit, and 0 waits"
        )
        left: list[int] = []

        def announce() -> None:
            if self._has_left(rank):
                left.append(rank)
            else:
                self._store.set(f"late/{rank}", problem)

        self._in_time(announce)
        if left or self._is_over.is_set():
            return
        # Before the kill, because the collective calls of all processes fail at once.
        self.problem = problem
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return
        except psutil.Error as error:
            self._give_up(rank, f"{problem} ({error})")

    def _give_up(self, rank: int, problem: str) -> None:
        """End this process: it may wait in a collective call, which cannot be cancelled."""
        self.problem = problem
        _logger.error("%s; rank %d exits", problem, self._rank)
        self._in_time(lambda: self._store.set(f"late/{rank}", problem))
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)

    def _in_time(self, action: Any) -> None:
        """Call a function of the store, and continue without its result if the store does not answer."""

        def attempt() -> None:
            with suppress(Exception):
                action()

        thread = threading.Thread(target=attempt, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # An interpreter that exits starts no threads in some versions of Python.
            attempt()
        else:
            thread.join(_PATIENCE)


class _Turns:
    """The turns that this process has waited in a collective call, and that another process was silent."""

    def __init__(self, limits: Limits) -> None:
        self.calls = 0
        self.num_waiting = 0
        self._limits = limits
        self._next_report = limits.late
        self._shortest = min((it for it in (limits.late, limits.overdue) if it), default=inf)
        self._beat, self._num_silent = -1, 0

    def count(self, calls: int) -> None:
        """Count one more turn, with the number of collective calls so far."""
        if calls == self.calls:
            self.num_waiting += 1
        else:
            self.calls, self.num_waiting, self._next_report = calls, 0, self._limits.late

    @property
    def is_half_late(self) -> bool:
        """True if this process has made no collective call for half of a limit."""
        return self._shortest <= self.num_waiting * _TICK * 2

    @property
    def is_overdue(self) -> bool:
        """True if this process has waited so long that the late ones are ended."""
        return 0 < self._limits.overdue <= self.num_waiting * _TICK

    def is_report_due(self) -> bool:
        """Return whether to look for late processes: after the limit, twice the limit, four times the limit."""
        if not self._next_report or self.num_waiting * _TICK < self._next_report:
            return False
        self._next_report *= 2
        return True

    def is_silent(self, beat: int) -> bool:
        """Return whether a process has sent the same beat for too many turns."""
        self._num_silent = self._num_silent + 1 if beat == self._beat else 0
        self._beat = beat
        return self._num_silent * _TICK >= self._limits.silent


def _is_stopped(process: psutil.Process) -> bool:
    try:
        # A process that a debugger has halted has another state.
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _num_collective_calls() -> int:
    """Return the number of collective calls that this process has started in groups of all processes."""
    groups: Any = dist.distributed_c10d._world.pg_map
    size = dist.get_world_size() if dist.is_initialized() else 0
    try:
        # Torch counts the calls itself, so a step costs nothing.
        return sum(group._get_sequence_number_for_group() for group in list(groups) if group.size() == size)
    except RuntimeError:
        # The backend of an extension may not count them; then no process is reported as late.
        return 0


def _place(thread: int) -> str:
    """Return the line that a thread executes: the innermost one of the user's files, else of any file."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    code = frame.f_code
    return f"at {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((*_LIBRARIES, _OWN_FOLDER, "<"))
