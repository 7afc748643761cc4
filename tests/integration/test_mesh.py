"""Meshes of copies and parts of a model against one process: a real gloo group of four processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dovetail.errors import ConfigError
from dovetail.trainers import FSDPTrainer, Trainer
from dovetail.trainers.capabilities.sharded import mesh_sizes

SCRIPT = Path(__file__).with_name("mesh_ranks.py")
Results = dict[int, list[dict[str, Any]]]
MESHES = ["[1, 4]", "[2, 2]", "[4, 1]"]


@pytest.fixture(scope="session")
def results(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("mesh")
    # In this order: one process continues the runs of four.
    return {size: run_group(SCRIPT, size, folder / str(size)) for size in (4, 1)}


def check_equal(found: Any, expected: Any) -> None:
    assert found["weights"] == pytest.approx(expected["weights"], rel=0, abs=1e-10)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=0, abs=1e-10)
    assert found["progress"] == expected["progress"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_as_one_process(results: Results, mesh: str) -> None:
    for each in results[4]:
        check_equal(each["trained"][mesh], results[1][0]["trained"])


@pytest.mark.slow
def test_a_process_holds_one_part_of_one_copy(results: Results) -> None:
    # Seven rows: in four parts, in two, and whole.
    rows = {mesh: [each["trained"][mesh]["rows"] for each in results[4]] for mesh in MESHES}
    assert rows == {"[1, 4]": [2, 2, 2, 1], "[2, 2]": [4, 3, 4, 3], "[4, 1]": [7, 7, 7, 7]}


@pytest.mark.slow
def test_every_mesh_resumes_the_checkpoints_of_every_other(results: Results) -> None:
    for each in results[4]:
        assert len(each["resumed"]) == 9
        for found in each["resumed"].values():
            check_equal(found, results[1][0]["uninterrupted"])


@pytest.mark.slow
def test_one_process_resumes_the_checkpoint_of_every_mesh(results: Results) -> None:
    resumed = results[1][0]["resumed"]
    assert sorted(resumed) == ["epoch-1x4", "epoch-2x2", "epoch-4x1"]
    for found in resumed.values():
        check_equal(found, results[1][0]["uninterrupted"])


@pytest.mark.slow
def test_a_mesh_of_another_number_of_processes_is_rejected(results: Results) -> None:
    for each in results[4]:
        assert each["rejected"].startswith("mesh: {'replicate': 3, 'shard': 5} does not divide 4 processes; the sizes")


@pytest.mark.parametrize(
    ("mesh", "size", "expected"),
    [
        (None, 6, {"shard": 6}),
        ({"replicate": 2, "shard": 3}, 6, {"replicate": 2, "shard": 3}),
        ({"replicate": 2, "shard": -1}, 6, {"replicate": 2, "shard": 3}),
        ({"replicate": 1, "shard": -1}, 6, {"shard": 6}),
    ],
)
def test_a_size_of_minus_one_is_the_rest_of_the_processes(mesh: Any, size: int, expected: dict[str, int]) -> None:
    assert mesh_sizes(mesh, size) == expected


@pytest.mark.parametrize(
    "mesh", [{}, {"rows": 2}, {"shard": 0}, {"shard": 1.5}, {"replicate": -1, "shard": -1}, [2, 2]]
)
def test_a_mesh_that_is_not_two_counts_is_rejected(mesh: Any) -> None:
    with pytest.raises(ConfigError, match="mesh: expected the sizes of 'replicate' and 'shard', such as"):
        FSDPTrainer(Trainer(nn.Linear(2, 2), "cpu"), mesh=mesh)
