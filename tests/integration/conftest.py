"""Real groups of processes, started as torchrun starts them."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from forked import start

RunGroup = Callable[[Path, int, Path], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_group() -> RunGroup:
    """A function that runs a script with a folder as its argument in processes that meet, or in one without a group.

    Every process writes what it found to `FOLDER/<rank>.json`; the function returns that, by rank.
    """
    return _run_group


@pytest.fixture(scope="session")
def light_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray processes that start faster and send no usage reports."""
    light = tmp_path_factory.mktemp("light")
    # Imported by every one of them, if it is there: a grammar that takes three quarters of their start to build.
    (light / "rfc3987_syntax.py").write_text("raise ImportError\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(light), prepend=os.pathsep)
        # As where only ray itself is installed: a node whose dashboard takes 15 s to start, on a busy machine, dies.
        patch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
        yield


def _run_group(script: Path, size: int, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"GLOO_SOCKET_IFNAME": "lo"}
    if size > 1:
        shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs = [folder / f"{rank}.log" for rank in range(size)]
    with ExitStack() as stack:
        processes = []
        for rank, log in enumerate(logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            output = stack.enter_context(log.open("w"))
            process = start(
                script, str(folder), folder=folder, stdout=output, stderr=output, variables={**shared, **place}
            )
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        codes = [process.wait(timeout=240) for process in processes]
    assert codes == [0] * size, "\n".join(log.read_text() for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
