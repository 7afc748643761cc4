"""Samples of a running run: its loss inside of an epoch, its gradient norm, and its use of CPU, memory and device.

The file `<name>_samples.jsonl` is beside the journal. It has one line every few seconds:

    {"start": 1767312000.0, "batches": 0}
    {"time": 1767312001.0, "batches": 800, "loss": 0.7, "cpu": 99.5, "memory": 512000000, "lr": 0.1, …}

`loss` is the mean over the batches since the last sample. A sample is taken only where the trainer has copied losses to
the host anyway, and its period grows with its cost and with the duration of the run. The journal does not contain them:
a table of a thousand runs must not read them all.
"""

from __future__ import annotations

import json
import math
import os
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from dovetail.history.lines import encode

# Seconds before the first sample: a shorter run needs none, and writes no file.
FIRST = 5.0
# Seconds between two samples at the start of a run.
SHORTEST = 2.0
# A period is at least the duration of the run divided by this number: an hour has about 1000 samples, a week 3500.
_NUM_RECENT = 500
# A period is at least this many times the CPU time of a sample, and a fifth of it times its duration, so that samples
# take at most 0.1 % of the CPU, and a slow disk delays a run by at most 0.5 %.
_COST_FACTOR = 1000.0

Probe = Callable[[], Mapping[str, float]]
"""Returns further values of a sample by name."""


def samples_path(journal: Path) -> Path:
    """Return the path of the samples that belong to a journal.

    Example:
        >>> samples_path(Path("runs/ck_run.jsonl")).name
        'ck_samples.jsonl'
    """
    return journal.with_name(f"{journal.stem.removesuffix('_run')}_samples.jsonl")


class Sampler:
    """Writes samples of this process. A disk that cannot be written never stops the run.

    Attributes:
        due: The time of the next sample, by `time.monotonic`; infinite before the start and after the end.

    Example:
        >>> import tempfile
        >>> sampler = Sampler(Path(tempfile.mkdtemp()) / "ck_samples.jsonl")
        >>> sampler.start(is_new=True)
        >>> sampler.sample(array("d", [3.0, 1.0]))
        >>> line = json.loads(sampler.path.read_text().splitlines()[-1])
        >>> line["batches"], line["loss"]
        (2, 2.0)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.due = math.inf
        self._probe: Probe | None = None
        self._began = 0.0
        self._head = b""
        self._num_losses = 0
        self._usage: _Usage | None = None

    def start(self, *, is_new: bool, num_losses: int = 0, probe: Probe | None = None) -> None:
        """Start to sample; `is_new` replaces the samples of an earlier run.

        Args:
            is_new: True if the run starts from scratch.
            num_losses: The number of losses that the history has already.
            probe: Further values of a sample; None means none.
        """
        self._num_losses, self._probe = num_losses, probe
        # Written with the first sample.
        self._head = _line({"start": round(time.time(), 3), "batches": num_losses})
        with suppress(OSError, psutil.Error):
            self._usage = _Usage()
        with suppress(OSError):
            if is_new:
                self.path.unlink(missing_ok=True)
            elif self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
                # A killed process has left half a line.
                self._head = b"\n" + self._head
        self._began = time.monotonic()
        self.due = self._began + FIRST

    def sample(self, losses: array[float]) -> None:
        """Write one sample, and set the time of the next one.

        Args:
            losses: The losses of all batches so far.
        """
        started, spent = time.monotonic(), time.thread_time()
        row: dict[str, Any] = {"time": round(time.time(), 3), "batches": len(losses)}
        if fresh := losses[self._num_losses :]:
            row["loss"] = sum(fresh) / len(fresh)
        self._num_losses = len(losses)
        # A process may end while it is looked up, and the probe reads values of the user; neither must stop the run.
        with suppress(Exception):
            row |= {} if self._usage is None else self._usage.read()
        with suppress(Exception):
            row |= {} if self._probe is None else self._probe()
        with suppress(OSError), self.path.open("ab") as file:
            file.write(self._head + _line(row))
            self._head = b""
        now = time.monotonic()
        cost = max(time.thread_time() - spent, (now - started) / 5)
        self.due = now + max(SHORTEST, (now - self._began) / _NUM_RECENT, _COST_FACTOR * cost)

    def end(self) -> None:
        """Take no further samples."""
        self.due, self._probe, self._usage = math.inf, None, None

    def __getstate__(self) -> dict[str, Any]:
        # A copy takes no samples: two writers would mix their lines.
        return {**self.__dict__, "due": math.inf, "_probe": None, "_usage": None}


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps({name: encode(value) for name, value in row.items()}, allow_nan=False).encode() + b"\n"


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of a process, and theirs."""
    listed = Path("/proc/self/task", str(process.pid), "children")
    if not listed.exists():
        return process.children(recursive=True)
    # Linux lists the children of each thread. psutil would read the status of every process of the machine.
    found: list[int] = []
    waiting = [process.pid]
    while waiting:
        tasks = Path("/proc", str(waiting.pop()), "task")
        with suppress(OSError):
            for thread in os.listdir(tasks):
                with suppress(OSError):
                    children = (tasks / thread / "children").read_text().split()
                    waiting += map(int, children)
                    found += map(int, children)
    processes = []
    for number in found:
        with suppress(psutil.Error):
            processes.append(psutil.Process(number))
    return processes


class _Usage:
    """Use of CPU and memory by this process, its children, and the whole machine, since the last call."""

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        self._spent = {self._key(self._process): self._seconds(self._process)}
        self._at, self._read_at = time.monotonic(), time.time()
        self._machine = (0.0, 0.0)
        self._of_machine()

    def read(self) -> dict[str, float]:
        """Return `cpu` and `machine_cpu` in percent (of one core, of all cores), and the memory in bytes."""
        memory, spent, busy = 0, {}, 0.0
        for process in [self._process, *_descendants(self._process)]:
            with suppress(psutil.Error), process.oneshot():
                memory += process.memory_info().rss
                key, used = self._key(process), self._seconds(process)
                spent[key] = used
                # A child that was started since the last sample counts from zero.
                busy += max(0.0, used - self._spent.get(key, 0.0 if key[1] >= self._read_at else used))
        now = time.monotonic()
        found = {"cpu": round(100 * busy / max(1e-3, now - self._at), 1), "memory": memory, **self._of_machine()}
        self._spent, self._at, self._read_at = spent, now, time.time()
        return found

    @staticmethod
    def _key(process: psutil.Process) -> tuple[int, float]:
        # A process number may be used again, so the start of the process belongs to its key.
        return process.pid, process.create_time()

    @staticmethod
    def _seconds(process: psutil.Process) -> float:
        used = process.cpu_times()
        return float(used.user + used.system)

    def _of_machine(self) -> dict[str, float]:
        times = psutil.cpu_times()
        total = sum(times[:8])
        idle = times.idle + getattr(times, "iowait", 0.0)
        before, self._machine = self._machine, (total, idle)
        share = 1 - (idle - before[1]) / max(1e-3, total - before[0])
        memory = psutil.virtual_memory()
        return {
            "machine_cpu": round(100 * min(max(share, 0.0), 1.0), 1),
            "machine_memory": memory.total - memory.available,
            "machine_total": memory.total,
        }
