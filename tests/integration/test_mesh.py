"""Meshes of copies, parts and tensor-parallel parts of a model against one process: real gloo groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.full_size, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("mesh_ranks.py")
Results = dict[int, list[dict[str, Any]]]
MESHES = {
    2: ["1x1x2", "1x2x1", "2x1x1"],
    3: ["1x1x3", "1x3x1", "3x1x1"],
    4: ["1x1x4", "1x2x2", "1x4x1", "2x1x2", "2x2x1", "4x1x1"],
}


@pytest.fixture(scope="session")
def results(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("mesh")
    # In this order: fewer processes continue the runs of four.
    return {size: run_group(SCRIPT, size, folder / str(size)) for size in (4, 2, 3, 1)}


def check_equal(found: Any, expected: Any) -> None:
    assert found["weights"] == pytest.approx(expected["weights"], rel=0, abs=1e-10)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=0, abs=1e-10)
    assert found["progress"] == expected["progress"]


@pytest.mark.slow
@pytest.mark.parametrize("size", MESHES)
def test_every_mesh_trains_and_predicts_as_one_process(results: Results, size: int) -> None:
    expected = results[1][0]["trained"]
    for each in results[size]:
        assert sorted(each["trained"]) == MESHES[size]
        for found in each["trained"].values():
            check_equal(found, expected)
            assert found["predicted"] == pytest.approx(expected["predicted"], rel=0, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("size", MESHES)
def test_metrics_that_synchronise_themselves_count_each_sample_once(results: Results, size: int) -> None:
    expected = results[1][0]["trained"]["synced"]
    assert sum(expected[1:]) == 17
    for each in results[size]:
        for mesh, found in each["trained"].items():
            assert found["synced"] == pytest.approx(expected, rel=0, abs=1e-6), mesh


@pytest.mark.slow
def test_a_process_holds_one_part_of_one_copy(results: Results) -> None:
    # A matrix of 7 rows, and one of 12 rows that the plan divides.
    shapes = {mesh: [each["trained"][mesh]["shapes"] for each in results[4]] for mesh in MESHES[4]}
    rows = {mesh: [[shape[0] for shape in each] for each in found] for mesh, found in shapes.items()}
    assert rows == {
        "1x4x1": [[2, 3], [2, 3], [2, 3], [1, 3]],
        "2x2x1": [[4, 6], [3, 6], [4, 6], [3, 6]],
        "4x1x1": [[7, 12]] * 4,
        "1x1x4": [[7, 3]] * 4,
        "1x2x2": [[4, 3], [4, 3], [3, 3], [3, 3]],
        "2x1x2": [[7, 6]] * 4,
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", MESHES)
def test_dropout_of_a_tensor_parallel_model_is_that_of_one_process(results: Results, size: int) -> None:
    for each in results[size]:
        check_equal(each["noisy"], results[1][0]["noisy"])


@pytest.mark.slow
def test_batch_norm_counts_every_sample_once(results: Results) -> None:
    for each in results[4]:
        check_equal(each["normed"], results[1][0]["normed"])


@pytest.mark.slow
def test_an_overflow_in_one_tensor_parallel_process_skips_the_step_in_all(results: Results) -> None:
    first, *others = [each["overflowed"] for each in results[4]]
    # Only the processes with the last unit can find it.
    assert [any(each["overflowed"]["found"]) for each in results[4]] == [False, False, False, True]
    assert first["updates"] == 8 - sum(others[-1]["found"])
    for other in others:
        assert [other["updates"], other["weights"]] == [first["updates"], first["weights"]]


@pytest.mark.slow
def test_a_stop_request_of_any_process_stops_all_of_them(results: Results) -> None:
    # The request of one process after update 2 travels with the next update.
    assert [each["stopped"]["updates"] for each in results[4]] == [3] * 4


@pytest.mark.slow
def test_utilisation_counts_every_process_of_the_mesh(results: Results) -> None:
    assert [each["stopped"]["num_devices"] for each in results[4]] == [4] * 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 3, 2, 1])
def test_meshes_resume_the_checkpoints_of_other_meshes(results: Results, size: int) -> None:
    # Six checkpoints of the end of an epoch, and those of its middle that have batches of a fitting size.
    least = {4: 6 + 4, 3: 1, 2: 3, 1: 6 + 1}[size]
    for each in results[size]:
        assert len(each["resumed"]) >= least
        for found in each["resumed"].values():
            check_equal(found, results[1][0]["uninterrupted"])


@pytest.mark.slow
def test_a_window_without_items_keeps_copies_equal(results: Results) -> None:
    for each in results[4]:
        assert each["counted"] == pytest.approx(results[1][0]["counted"], rel=0, abs=1e-10)


@pytest.mark.slow
def test_a_mesh_that_fits_neither_the_processes_nor_the_model_is_rejected(results: Results) -> None:
    for each in results[4]:
        model, processes = each["rejected"]
        assert processes.startswith("mesh: {'replicate': 3, 'shard': 2, 'tensor': 1} does not divide 4 processes")
        assert model.startswith(
            "mesh: this model is already divided over the mesh {'shard': 2, 'tensor': 2}, and this run requests "
            "{'replicate': 2, 'shard': 2}"
        )
