"""A real SuperLink with real SuperNodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed: nothing is known of Flower")

from dovetail.federated.flower.local import LocalFlower

HERE = Path(__file__).parent / "flower_app"
sys.path.insert(0, str(HERE))
import lines_app  # noqa: E402 - the app that Flower runs, for the run without Flower

# Most of a test is imports of torch, in one process for every task; a machine may be busy with others.
DEADLINE = 240
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE)]

# A node that shows itself more often than others, so that a killed one is missed sooner.
_NODE = """
import flwr.supercore.heartbeat as sending
import flwr.supernode.fleet_http_connection as promising
from flwr.supernode.cli.flower_supernode import flower_supernode
sending.HEARTBEAT_DEFAULT_INTERVAL = promising.HEARTBEAT_DEFAULT_INTERVAL = 12
flower_supernode()
"""


class Flower(LocalFlower):
    def _node_command(self) -> list[str]:
        return [sys.executable, "-c", _NODE]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    """The output of the federation on Flower, with a node killed in the second round, and without Flower."""
    on_flower, plain = tmp_path_factory.mktemp("flower"), tmp_path_factory.mktemp("plain")
    app = on_flower / "app"
    shutil.copytree(HERE, app, ignore=shutil.ignore_patterns("__pycache__"))
    description = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(description.replace('folder = ""', f"folder = {json.dumps(str(on_flower))}"))
    with Flower(on_flower / "processes", num_nodes=2) as flower:
        flower.submit(app)
        wait_for(flower, on_flower / "stopped")
        os.kill(flower.nodes[lines_app.KILLED_CLIENT - 1].pid, signal.SIGKILL)
        wait_for(flower, on_flower / f"{lines_app.NUM_ROUNDS}.pt")
        groups = [process.pid for process in flower._processes]
    server, client = lines_app.federation(plain, is_flower=False)
    server.run(client)
    return on_flower, plain, groups


def wait_for(flower: Any, path: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not path.exists():
        flower.check()
        if time.monotonic() > deadline:
            logs = [flower.last_output(name) for name in ("run", "superlink", "supernode-0", "supernode-1")]
            pytest.fail(f"no {path.name} after {DEADLINE} seconds\n" + "\n\n".join(logs))
        time.sleep(0.05)


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(1, lines_app.NUM_ROUNDS + 1)]


def same(ours: Any, theirs: Any) -> list[bool]:
    return [
        all(torch.equal(value, there["weights"][name]) for name, value in here["weights"].items())
        for here, there in zip(ours, theirs, strict=True)
    ]


def test_rounds_on_flower_equal_serial_ones_bit_for_bit(folders: Any) -> None:
    on_flower, plain, _ = folders
    # In the second round, the remaining client continues with the state stored at its node.
    ours, theirs = rounds(on_flower)[:2], rounds(plain)[:2]
    assert same(ours, theirs) == [True, True]
    assert [it["record"]["metrics"] for it in ours] == [it["record"]["metrics"] for it in theirs]
    assert [it["record"]["reported"] for it in ours] == [(1, 2), (1,)]


def test_a_killed_node_is_a_fault_of_its_client_and_the_round_continues(folders: Any) -> None:
    on_flower, _, _ = folders
    (fault,) = rounds(on_flower)[lines_app.KILLED_ROUND - 1]["record"]["faults"]
    assert fault == {"client_id": 2, "round": 2, "kind": "crashed", "reason": "client 2: its node was lost"}


def test_later_rounds_continue_without_the_killed_node(folders: Any) -> None:
    on_flower, _, _ = folders
    record = rounds(on_flower)[lines_app.KILLED_ROUND]["record"]
    assert record["reported"] == (1,)
    assert [fault["reason"] for fault in record["faults"]] == [
        "client 2: it has no node (there are nodes with partition-id 0)"
    ]


def test_flower_leaves_no_process(folders: Any) -> None:
    *_, groups = folders
    deadline = time.monotonic() + DEADLINE
    # The kernel takes a moment to end what was killed.
    while (left := [pid for group in groups for pid in live_processes(group)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def live_processes(group: Any) -> Iterator[int]:
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                yield process.pid


@pytest.mark.torture
def test_the_flower_command_gives_the_same_rounds_as_without_flower(tmp_path: Path) -> None:
    config = tmp_path / "config.yml"
    config.write_text(
        "clients: {total_clients: 3, per_round: 2, outbound_processors: [qsgd]}\n"
        "trainer: {rounds: 1, epochs: 1, batch_size: 32, optimizer: SGD}\n"
        "parameters: {optimizer: {lr: 0.1}}\n"
        "server: {num_workers: 2}\n"
    )

    def run(*options: Any) -> list[tuple[Any, Any, Any]]:
        words = [sys.executable, "-m", "dovetail", "federate", str(config), "--json", *options]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert done.returncode == 0, done.stderr
        return [(it["reported"], it["faults"], it["metrics"]) for it in json.loads(done.stdout)]

    assert run("--flower") == run()
