"""The Core API and batch processing in a real group of two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

SCRIPT = Path(__file__).with_name("core_ranks.py")
Results = list[dict[str, Any]]


@pytest.fixture(scope="session")
def results(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each case gave in each rank."""
    found: Results = run_group(SCRIPT, 2, tmp_path_factory.mktemp("core"))
    return found


def test_messages_arrive_in_the_order_of_the_ranks(results: Results) -> None:
    everywhere = {
        "allgather": [{"rank": 0, "list": [1, "a", None]}, {"rank": 1, "list": [1, "a", None]}],
        "allgather_local": [0, 1],
        "broadcast": "from 0",
        "broadcast_local": "from 0",
    }
    first, second = (each["messages"] for each in results)
    assert first == {**everywhere, "gather": [0, 1], "gather_local": [0, 1]}
    assert second == {**everywhere, "gather": None, "gather_local": None}


def test_tensors_tuples_and_arrays_arrive_with_their_type(results: Results) -> None:
    expected = [["tuple", rank, [rank, rank], "float32", 100_000] for rank in range(2)]
    assert [each["structures"] for each in results] == [expected, expected]


def test_local_messages_remain_on_their_machine(results: Results) -> None:
    assert [each["several_machines"] for each in results] == [[[0], [0], 0], [[1], [1], 1]]


def test_a_value_that_cannot_be_sent_is_named_in_all_processes(results: Results) -> None:
    for each in results:
        (kind, sentence), after = each["a_value_that_cannot_be_sent"]
        assert kind == "DataError"
        assert sentence.startswith(
            "rank 1 cannot send its message: value: cannot store a builtins.set (accepted: dict,"
        )
        assert after == [0, 1]


def test_a_context_with_another_rank_than_the_process_is_rejected(results: Results) -> None:
    for rank, each in enumerate(results):
        kind, sentence = each["another_place"]
        expected = f"this process is rank {rank} of 2, but its DistributedContext has rank {1 - rank} of 2"
        assert (kind, sentence) == ("ConfigError", expected)


def test_shards_of_all_processes_become_one_checkpoint(results: Results) -> None:
    first, second = (each["shards"] for each in results)
    assert first == second
    assert first["files"] == {"deep/own-0": "own 0", "deep/own-1": "own 1", "same": "the same"}
    assert first["copied"] == ["deep/own-0", "deep/own-1", "same"]
    assert first["metadata"] == {"steps_completed": 3, "rank 0": 0, "rank 1": 1}
    assert first["latest"] == first["id"]


def test_a_process_may_upload_no_files(results: Results) -> None:
    assert [each["uploads"] for each in results] == [["only"], ["only"]]


def test_an_error_in_one_process_is_raised_in_all_and_leaves_no_files(results: Results) -> None:
    first, second = (each["refused_shards"] for each in results)
    assert first["left"]
    assert second["left"]
    different = ["CheckpointError", "file: rank 0 and rank 1 have stored different files of that name"]
    metadata = ["CheckpointError", "metadata: 'note' is 0 in rank 0 and 1 in rank 1"]
    assert first["sentences"][:2] == second["sentences"][:2] == [different, metadata]
    own = second["sentences"][2:]
    assert [kind for kind, _ in own] == ["ConfigError", "CheckpointError", "ArithmeticError"]
    for (kind, sentence), (own_kind, own_sentence) in zip(first["sentences"][2:], own, strict=True):
        assert kind == "CheckpointError"
        assert sentence == f"rank 1 could not store its part of a checkpoint: {own_kind}: {own_sentence}"


def test_all_processes_get_the_preemption_answer_of_the_chief(results: Results) -> None:
    # First the other process receives the signal, then the chief.
    assert [each["preemption"] for each in results] == [[False, False, False, True]] * 2


def test_only_one_process_reports(results: Results) -> None:
    assert [each["reports"] for each in results] == [[{"rank": 0}]] * 2


def numbers(results: Results, case: str) -> list[list[list[int]]]:
    return [[batch for _, batch in each[case]["seen"]] for each in results]


def test_every_batch_is_processed_once_by_one_rank(results: Results) -> None:
    assert numbers(results, "batches") == [
        [[0, 1], [4, 5], [8, 9], [12, 13]],
        [[2, 3], [6, 7], [10, 11], [14]],
    ]
    for each in results:
        assert [index for index, _ in each["batches"]["seen"]] == [0, 1, 2, 3]


def test_reducers_see_all_processes_and_progress_is_reported(results: Results) -> None:
    first = results[0]["batches"]
    assert first["metrics"] == [{"total": sum(range(15))}]
    assert first["progress"] == [0.75, 1]
    assert "output" in first["left"]


def test_max_batches_applies_to_each_process(results: Results) -> None:
    assert numbers(results, "few_batches") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_signal_ends_all_processes_at_the_next_checkpoint_and_they_resume(results: Results) -> None:
    for rank, each in enumerate(results):
        first, second, outputs = each["interrupted_batches"]
        assert (first["code"], second["code"]) == (143, None)
        assert [index for index, _ in first["seen"]] == [0, 1]
        assert [index for index, _ in second["seen"]] == [2, 3]
        assert [batch for _, batch in first["seen"] + second["seen"]] == numbers(results, "batches")[rank]
        assert outputs == ["0.txt", "0.txt", "1.txt", "1.txt", "2.txt", "2.txt", "3.txt", "3.txt"]
    first, second, _ = results[0]["interrupted_batches"]
    assert first["metrics"] == []
    assert second["metrics"] == [{"total": sum(range(15))}]


def test_more_processes_resume_and_process_no_batch_twice(results: Results) -> None:
    found = [each["more_processes_go_on"] for each in results]
    assert [each["seen"] for each in found] == [
        [[3, [6, 7]], [4, [10, 11]], [5, [14]]],
        [[3, [8, 9]], [4, [12, 13]]],
    ]
    assert found[0]["metrics"] == [{"total": sum(range(15))}]


def test_an_error_in_one_process_is_named_in_the_other(results: Results) -> None:
    found = [each["an_error_in_one_process"] for each in results]
    assert found == [
        ["PeerError", "rank 1 failed: ArithmeticError: no luck"],
        ["ArithmeticError", "no luck"],
    ]
