"""Real groups of processes, started as torchrun starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunGroup = Callable[[Path, int, Path], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_group() -> RunGroup:
    """A function that runs a script with a folder as its argument in processes that meet, or in one without a group.

    Every process writes what it found to `FOLDER/<rank>.json`; the function returns that, by rank.
    """
    return _run_group


def _run_group(script: Path, size: int, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if size > 1 else {}
    shared = {**os.environ, **meeting, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(size)]
    processes = []
    for rank, log in enumerate(logs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
        command = [sys.executable, str(script), str(folder)]
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(command, env={**shared, **place}, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * size, "\n".join(log.read_text() for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
