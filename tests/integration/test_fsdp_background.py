"""Sharded checkpoints that threads write while training continues: two gloo processes, one of which is killed."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from forked import start

from dovetail import checkpoint

pytestmark = [pytest.mark.full_size, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("background_ranks.py")


def run_until_the_kill(folder: Path, operations: int) -> None:
    folder.mkdir()
    (folder / "kill").write_text(str(operations))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ExitStack() as stack:
        processes = []
        for rank in ("0", "1"):
            output = stack.enter_context((folder / f"{rank}.log").open("w"))
            variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            process = start(SCRIPT, str(folder), folder=folder, stdout=output, stderr=output, variables=variables)
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        codes = [process.wait(timeout=120) for process in processes]
    assert codes[0] != 0, "rank 0 was not killed"
    (folder / "kill").unlink()


@pytest.mark.parametrize("operations", [9, *(pytest.param(it, marks=pytest.mark.torture) for it in (3, 14, 20, 27))])
def test_background_shards_equal_foreground_ones_and_survive_a_kill(
    run_group: Any, tmp_path: Path, operations: int
) -> None:
    folder = tmp_path / "ranks"
    run_until_the_kill(folder, operations)
    # Whatever is visible after the kill is complete.
    for path in (folder / "killed").glob("ck_epoch_*") if (folder / "killed").exists() else ():
        checkpoint.load(path)
    results = run_group(SCRIPT, 2, folder)
    check_errors(folder, [each["full"] for each in results], [each["taken"] for each in results])
    for each in results:
        assert each["background"] == each["foreground"] == each["resumed"]
        assert each.get("after the kill", each["foreground"]) == each["foreground"]
    names = [f"ck_epoch_0_iter_{number}" for number in (2, 4, 6, 8)]
    first = run_names(folder, "background")
    assert first == run_names(folder, "foreground") == sorted(names)
    for name in names:
        one, other = (checkpoint.load(folder / place / name) for place in ("foreground", "background"))
        assert_same(one["model"], other["model"])
        assert_same(one["optimizers"], other["optimizers"])


def check_errors(folder: Path, full: list[Any], taken: list[Any]) -> None:
    """Check that the error of one thread is raised in all processes, or shown as a warning in all of them."""
    problem = f"CheckpointError: {folder}/full/ck_epoch_0_iter_2: the checkpoint could not be written: [Errno 27]"
    assert [each["error"].partition(" File too large")[::2] for each in full] == [(problem, " (rank 1)"), (problem, "")]
    assert [each["saved"] for each in full] == [[], []]
    # By the checkpoint after it, and not by a step, which would be another one in each process.
    assert [each["batches"] for each in full] == [4, 4]
    assert run_names(folder, "full") == []
    assert [each["error"] for each in taken] == [None, None]
    problem = f"{folder}/taken/ck_epoch_0_iter_4: not a checkpoint of Dovetail, so it is not replaced"
    assert [each["warned"] for each in taken] == [[problem], [f"{problem} (rank 0)"]]
    # `on_checkpoint` is called for those that were written, and the run continues.
    assert [each["saved"] for each in taken] == [[f"ck_epoch_0_iter_{number}" for number in (2, 6, 8)], []]


def run_names(folder: Path, place: str) -> list[str]:
    return sorted(name for name in os.listdir(folder / place) if name.startswith("ck_epoch"))


def assert_same(one: Any, other: Any) -> None:
    import torch

    torch.testing.assert_close(one, other, rtol=0, atol=0)
