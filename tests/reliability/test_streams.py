"""Runs over streams that are killed and continued by other numbers of processes and workers: each sample once."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import forked
import pytest
from stream_cells import VISION

pytestmark = [pytest.mark.full_size, pytest.mark.slow, pytest.mark.usefixtures("forking")]

_SCRIPT = Path(__file__).with_name("stream_training.py")
_NUM_SAMPLES, _NUM_EPOCHS = 120, 2
# Processes, workers of each, and the step at which all of them are killed; checkpoints are written at even steps.
_RUNS = ((1, 0, 5), (2, 2, 9), (3, 1, 13), (1, 0, 0))

_ALWAYS = ("your own stream", "torchdata", "a loader with state_dict")
_AT_LENGTH = ("Hugging Face `IterableDataset`", "… after `shuffle`", "webdataset", "litData", "MosaicML streaming")
_MODULES = {
    "Hugging Face `IterableDataset`": "datasets",
    "… after `shuffle`": "datasets",
    "webdataset": "webdataset",
    "litData": "litdata",
    "torchdata": "torchdata",
}


@pytest.mark.parametrize("library", [*_ALWAYS, *(pytest.param(it, marks=pytest.mark.torture) for it in _AT_LENGTH)])
def test_each_sample_is_used_once_over_kills_and_other_numbers_of_processes(library: str, tmp_path: Path) -> None:
    if library == "MosaicML streaming":
        VISION["skip_unless_installed"]()
    elif library in _MODULES:
        pytest.importorskip(_MODULES[library])
    (tmp_path / "samples").mkdir()
    used: list[dict[str, object]] = []
    for number, (size, num_workers, kill_at) in enumerate(_RUNS):
        _run(tmp_path, library, size, num_workers, kill_at)
        rows = _rows(tmp_path)
        assert len({json.dumps(row) for row in rows}) == len(rows)
        first = min(int(str(row["step"])) for row in rows)
        assert first == (0 if number == 0 else _RUNS[number - 1][2] // 2 * 2)
        # Batches after the last checkpoint are trained again.
        used = [row for row in used if int(str(row["step"])) < first] + rows
    for epoch in range(_NUM_EPOCHS):
        counts = Counter(sample for row in used if row["epoch"] == epoch for sample in row["samples"])  # type: ignore[attr-defined]
        assert counts == Counter(range(_NUM_SAMPLES))


def _run(folder: Path, library: str, size: int, num_workers: int, kill_at: int) -> None:
    """Run a group of processes until all of them are killed, or to the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    group |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    logs = [folder / f"{rank}.log" for rank in range(size)]
    with ExitStack() as stack:
        processes = []
        for rank, log in enumerate(logs):
            variables = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            output = stack.enter_context(log.open("w"))
            process = forked.start(
                _SCRIPT,
                *(folder, library, num_workers, kill_at),
                folder=folder,
                stdout=output,
                stderr=output,
                variables=variables,
            )
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        codes = [process.wait(timeout=240) for process in processes]
    expected = -signal.SIGKILL if kill_at else 0
    assert codes == [expected] * size, "\n".join(log.read_text() for log in logs)


def _rows(folder: Path) -> list[dict[str, object]]:
    """Return the batches of the last run, and remove their files."""
    rows = []
    for path in (folder / "samples").iterdir():
        rows += [json.loads(line) for line in path.read_text().splitlines()]
        os.unlink(path)
    return rows
