"""Training that is killed repeatedly and resumes exactly.

Real processes and real `SIGKILL`s, sent at random moments and while checkpoints are being written. `DOVETAIL_TORTURE=1`
runs the same code at full size: 200 kills instead of 20, and a kill at every single file operation.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dovetail.history import History

_TORTURE = os.environ.get("DOVETAIL_TORTURE") == "1"
_KILLS = 200 if _TORTURE else 20
_FEWER_KILLS = 50 if _TORTURE else 6
# Every n-th file operation of a run is one to die at.
_STRIDE = 1 if _TORTURE else 9

pytestmark = [pytest.mark.full_size, pytest.mark.slow, pytest.mark.timeout(600)]


class Nursery:
    """A process that has imported torch and forks one training after another; see `training.serve`."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("training.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._told = self._process.stdin, self._process.stdout.fileno()

    def start(self, folder: Path, *, tell: bool = False, die_at: int | None = None, **options: Any) -> int:
        """Start a training and return its id."""
        request = {"folder": str(folder), "tell": tell, "die_at": die_at, "options": options}
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        return int(self._line())

    def hear(self, seconds: float) -> bytes:
        """Return the next message of the training, or nothing after the timeout."""
        ready, _, _ = select.select([self._told], [], [], max(0.0, seconds))
        return os.read(self._told, 1) if ready else b""

    def end(self) -> int:
        """Wait for the end of the training and return its exit code."""
        self._requests.write(b"\n")
        self._requests.flush()
        self._line()
        return int(self._line())

    def run(self, folder: Path, **options: Any) -> int:
        self.start(folder, **options)
        return self.end()

    def close(self) -> None:
        with self._process:
            self._requests.close()

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            read = os.read(self._told, 1)
            assert read, "the nursery is dead"
            line += read
        return line


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def _unfinished(folder: Path) -> set[str]:
    """Return the names of the writes that a kill cut short."""
    checkpoints = folder / "checkpoints"
    return {name for name in os.listdir(checkpoints) if name.startswith(".")} if checkpoints.exists() else set()


def _files(folder: Path) -> dict[str, bytes]:
    """Return all files with their contents, without times, run id and journal, which differ between equal runs."""
    contents = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json" and not path.name.endswith(("_run.jsonl", "_samples.jsonl"))
    }
    for name, content in contents.items():
        if name.endswith("/state.json"):
            state = json.loads(content)
            assert state.pop("run_id")
            contents[name] = json.dumps(state).encode()
    return contents


def _differing(files: dict[str, bytes], reference: dict[str, bytes]) -> list[str]:
    """Return the names of files that are in one of the two only, or differ."""
    return sorted(name for name in files.keys() | reference.keys() if files.get(name) != reference.get(name))


def _kill_at_a_moment(nursery: Nursery, folder: Path, moments: random.Random, within: float, **options: Any) -> None:
    """Start the training, and kill it at a random moment: half of the times anywhere, half of the times in a write."""
    aims_at_write = moments.random() < 0.5
    pid = nursery.start(folder, tell=aims_at_write, **options)
    if aims_at_write:
        # A write reports about six operations, so this is any stage of one of the next few writes.
        for _ in range(moments.randrange(1, 30)):
            if nursery.hear(60) != b".":
                break
        nursery.hear(moments.uniform(0, 0.003))
    else:
        deadline = time.monotonic() + moments.uniform(0, within)
        while nursery.hear(deadline - time.monotonic()) == b".":
            pass
    os.kill(pid, signal.SIGKILL)


def _torture(nursery: Nursery, folder: Path, kills: int, **options: Any) -> tuple[int, int]:
    """Kill trainings until `kills` have hit, and one of them a write; every one must end as if it had not been.

    Returns:
        The number of hits on writes, and of runs.
    """
    start = time.monotonic()
    assert nursery.run(folder / "reference", **options) == 0
    half_a_run = (time.monotonic() - start) / 2
    reference = _files(folder / "reference")
    moments = random.Random(0)
    hits = in_writes = 0

    def is_enough() -> bool:
        # A write may take less than a thousandth of a run.
        return hits >= kills and (in_writes > 0 or hits >= 30 * kills)

    for run in itertools.count(1):
        place = folder / f"run-{run}"
        while True:
            before = _unfinished(place)
            if not is_enough():
                _kill_at_a_moment(nursery, place, moments, half_a_run, **options)
                code = nursery.end()
            else:
                code = nursery.run(place, **options)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            hits += 1
            in_writes += bool(_unfinished(place) - before)
        assert _differing(_files(place), reference) == []
        if is_enough():
            break
    return in_writes, run


def test_the_test_run_stops_early_within_an_epoch(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(tmp_path) == 0
    history = History.load(tmp_path / "history.jsonl")
    assert len(history.losses) == 98
    assert len({row["lr"] for row in history if row["stage"] == "train"}) == 4
    assert len(history.get_metric_values("valid_loss")) > 4


def test_a_run_killed_repeatedly_ends_as_an_uninterrupted_one(nursery: Nursery, tmp_path: Path) -> None:
    in_writes, runs = _torture(nursery, tmp_path, _KILLS)
    print(f"{_KILLS} kills, {in_writes} of them in a write, over {runs} runs")
    assert in_writes > 0


def test_a_killed_run_with_background_checkpoints_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    in_writes, runs = _torture(nursery, tmp_path, _FEWER_KILLS, save_in_background=True)
    print(f"{_FEWER_KILLS} kills, {in_writes} of them in a write, over {runs} runs")
    assert in_writes > 0


def test_a_killed_run_with_a_global_generator_loader_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    _torture(nursery, tmp_path, _FEWER_KILLS, loader="torch")


def test_a_killed_run_with_augmenting_workers_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    in_writes, runs = _torture(nursery, tmp_path, _KILLS, loader="augmented")
    print(f"{_KILLS} kills, {in_writes} of them in a write, over {runs} runs")
    assert in_writes > 0


@pytest.mark.torture
def test_a_killed_run_with_persistent_workers_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    _torture(nursery, tmp_path, _FEWER_KILLS, loader="persistent", save_in_background=True)


_SHORT_RUNS = {
    # The last validation is the best and the last checkpoint is not due: both are written at the very end.
    "the best comes last": {"save_every": 7, "validate_every": 10, "keep_last": 1},
    # The checkpoint of the epoch comes before the validation that the end of training adds.
    "validation comes last": {"save_every": -1, "validate_every": 14, "keep_last": 1},
    "in the background": {"save_every": 7, "validate_every": 10, "keep_last": 1, "save_in_background": True},
}


@pytest.mark.parametrize(
    "name", [next(iter(_SHORT_RUNS)), *(pytest.param(it, marks=pytest.mark.torture) for it in [*_SHORT_RUNS][1:])]
)
def test_a_run_survives_a_kill_at_any_file_operation(nursery: Nursery, tmp_path: Path, name: str) -> None:
    options = {"num_epochs": 1, **_SHORT_RUNS[name]}
    assert nursery.run(tmp_path / "reference", **options) == 0
    reference = _files(tmp_path / "reference")
    wrong = {}
    for operation in itertools.count(1, _STRIDE):
        place = tmp_path / f"killed-at-{operation}"
        code = nursery.run(place, die_at=operation, **options)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        code = nursery.run(place, **options)
        if code != 0 or (differing := _differing(_files(place), reference)):
            wrong[operation] = code or differing
    assert not wrong, wrong


_KILLED_READER = """
import os, signal
from dovetail.data import DataLoader

def kill_parent(worker):
    parent = os.getppid()
    print(os.getpid(), flush=True)
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        pass

list(DataLoader(range(8), num_workers=1, worker_init_fn=kill_parent))
"""


@pytest.mark.usefixtures("forking")
def test_a_data_worker_ends_if_its_parent_is_killed_while_it_starts() -> None:
    with subprocess.Popen([sys.executable, "-c", _KILLED_READER], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        worker = int(reader.stdout.readline())
        try:
            # The worker has the other end of the pipe, so this waits for its end, too.
            assert reader.communicate(timeout=60)[0] == ""
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    assert reader.returncode == -signal.SIGKILL
