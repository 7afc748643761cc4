"""Several processes against one: real gloo groups of 2 and 3, started as torchrun starts them."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

SCRIPT = Path(__file__).with_name("ranks.py")
Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def results(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    # In this order: one and three processes continue the run of two.
    return {size: run_group(SCRIPT, size, folder / str(size)) for size in (2, 3, 1)}


def nearly(expected: Any, tolerance: float) -> Any:
    return pytest.approx(expected, rel=0, abs=tolerance)


sizes = pytest.mark.parametrize("size", [2, 3])
EXACT = [
    "even_batches",
    "uneven_batches",
    "clipping",
    "accumulation",
    "idle_inside_a_window",
    "idle_inside_a_window_of_two_optimizers",
    "idle_inside_a_window_of_manual_steps",
    "alternating_layers",
    "graphs_of_gradients",
    "complex_parameters",
    "parameters_outside_of_the_model",
    "parameters_outside_of_a_sharded_model",
    "less_data_than_processes",
    "counted_items",
    "counted_tokens",
    "tokens_of_manual_steps",
    "weights_of_samples_and_classes",
    "synced_norms",
    "synced_norms_in_windows",
    "synced_norms_and_counted_items",
]

# Of `window_ranks.py`.
UNEVEN = [
    "kept_in_windows",
    "kept_in_turns_in_windows",
    "plain_in_windows",
    "gan_in_windows",
    "gan_in_float16_in_windows",
    "counted_by_hand_in_windows",
    "rare_in_windows",
    "rare_and_kept_in_windows",
    "changing_layers_in_windows",
    "frozen_at_the_step_in_windows",
    "rare",
    "rare_and_kept",
    "frozen_at_the_step",
    "sharded_kept_in_windows",
    "sharded_kept_in_turns_in_windows",
]


@sizes
@pytest.mark.parametrize("name", EXACT)
def test_a_group_trains_as_one_process_on_the_same_global_batches(results: Results, name: str, size: int) -> None:
    alone = results[1][0][name]
    for each in results[size]:
        assert each[name]["weights"] == nearly(alone["weights"], 1e-12)
        assert each[name]["metrics"] == nearly(alone["metrics"], 1e-12)
        assert each[name]["progress"] == alone["progress"]


@sizes
@pytest.mark.parametrize("name", UNEVEN)
def test_a_group_has_the_gradients_of_one_process(results: Results, name: str, size: int) -> None:
    alone = results[1][0][name][str(size)]
    for each in results[size]:
        found = each[name][str(size)]
        assert found["progress"] == alone["progress"]
        for own, other in zip(found["gradients"], alone["gradients"], strict=True):
            assert own == nearly(other, 3e-3 if "float16" in name else 1e-12)


@sizes
def test_synchronised_norms_keep_the_names_of_the_state(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["synced_norms"]["names"] == results[1][0]["synced_norms"]["names"]


@sizes
def test_synchronised_norms_agree_in_bfloat16(results: Results, size: int) -> None:
    first, *others = [each["synced_norms_in_low_precision"] for each in results[size]]
    assert first == nearly(results[1][0]["synced_norms_in_low_precision"], 2e-2)
    assert all(other == first for other in others)


@sizes
def test_synchronised_norms_and_micro_batches_are_rejected(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["synced_norms_and_micro_batches"].startswith("sync_batchnorm: a process whose AutoBatch layer")
    assert results[1][0]["synced_norms_and_micro_batches"] is None


@sizes
def test_float16_with_accumulation_and_clipping_agrees_with_one_process(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["low_precision"]["weights"] == nearly(results[1][0]["low_precision"]["weights"], 2e-3)


@sizes
@pytest.mark.parametrize("name", ["other_order_of_layers", "two_optimizers"])
def test_layers_combine_in_either_order_and_with_several_optimizers(results: Results, name: str, size: int) -> None:
    first, *others = [each[name] for each in results[size]]
    assert first == nearly(results[1][0][name], 2e-2)
    assert all(other == first for other in others)


@sizes
def test_every_evaluation_metric_counts_each_sample_once(results: Results, size: int) -> None:
    for number, alone in enumerate(results[1][0]["evaluation"]):
        expected = {name: float(value) for name, value in alone.items()}
        for each in results[size]:
            found = {name: float(value) for name, value in each["evaluation"][number].items()}
            assert found == pytest.approx(expected, rel=0, abs=1e-12, nan_ok=True), f"{number} samples"


@sizes
def test_every_process_decides_by_the_metrics_of_the_first_one(results: Results, size: int) -> None:
    first, *others = [each["metrics_of_one_process"] for each in results[size]]
    assert first["metrics"][0].items() >= {"valid_own": "1.0", "valid_rank": "0.0", "valid_undefined": "nan"}.items()
    assert first["metrics"][1]["train_rank"] == "0.0"
    assert [first["best"], first["evaluated"], first["rate"]] == [3.0, 4.0, 0.3]
    assert all(other == first for other in others)


@sizes
def test_predictions_are_gathered_in_order(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["prediction"] == results[1][0]["prediction"]


@sizes
def test_predictions_and_metrics_count_every_batch_of_an_uneven_stream(results: Results, size: int) -> None:
    alone = results[1][0]["uneven_stream"]
    assert alone["metrics"]["count"] == 23
    for each in results[size]:
        found = each["uneven_stream"]
        assert list(chain(*found["predicted"])) == nearly(list(chain(*alone["predicted"])), 1e-12)
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=0, abs=1e-12)


@sizes
@pytest.mark.parametrize("name", ["stream", "generator_without_length", "shuffled_by_torch"])
def test_every_sample_of_any_data_is_seen_once(results: Results, name: str, size: int) -> None:
    seen = sorted(sample for each in results[size] for sample in each[name]["samples"])
    assert seen == sorted(results[1][0][name]["samples"])
    assert len({each[name]["batches"] for each in results[size]}) == 1
    assert len({json.dumps(each[name]["weights"]) for each in results[size]}) == 1


@sizes
def test_a_distributed_sampler_is_kept(results: Results, size: int) -> None:
    found = [each["distributed_sampler"] for each in results[size]]
    assert [len(each["samples"]) for each in found] == [-(-28 // size)] * size
    # The sampler also receives the epoch: the second has another order.
    assert all(each["samples"] != each["again"] for each in found)


@sizes
def test_batches_with_weight_zero_change_no_buffer(results: Results, size: int) -> None:
    found = [each["buffers_of_idle_batches"] for each in (*results[1], *results[size])]
    # The last process has two batches in each of two epochs.
    assert found[-1]["batches"] == 4
    for each in found:
        assert each["calls"] == [each["batches"]] * 3
        assert each["means"] == [nearly(each["mean"], 1e-12)] * 2


@sizes
def test_buffers_are_copied_from_a_process_that_had_a_batch(results: Results, size: int) -> None:
    """The others have four or six batches in the epoch, of which the first process has two."""
    last = 12 // size
    for each in results[size]:
        found = each["buffers_of_a_first_process_without_batches"]
        assert found["at the end"] == [last]
        assert found["after a stop"] == [4]
        # Only processes with a batch of the validation note it, after each third batch and at the end.
        assert set(found["validated"]) <= {3, last}
        assert found["validated"][-1] == last
    assert 3 in results[size][0]["buffers_of_a_first_process_without_batches"]["validated"]


@sizes
def test_all_batches_are_used_if_the_first_process_has_none(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["first_process_without_data"] == {"records": 48 - 48 // size, "calls": 12 // size}


@sizes
def test_named_tuples_keep_their_names(results: Results, size: int) -> None:
    for each in (*results[1], *results[size]):
        assert each["named_tuples"] == {"records": 24, "rows": [24, 24]}


@sizes
def test_a_batch_that_cannot_be_sent_to_a_process_without_one_is_rejected(results: Results, size: int) -> None:
    assert results[1][0]["batch_that_cannot_be_sent"] is None
    expected = "there are fewer batches than processes, and a Own cannot be sent"
    for each in results[size]:
        assert expected in each["batch_that_cannot_be_sent"]


@sizes
def test_an_optimizer_with_a_closure_is_rejected(results: Results, size: int) -> None:
    assert results[1][0]["closures"] is None
    for each in results[size]:
        assert "(LBFGS) cannot work in several processes" in each["closures"]


@sizes
def test_data_of_different_lengths_are_rejected_if_the_length_counts(results: Results, size: int) -> None:
    assert results[1][0]["unequal_lengths"] == {}
    # Each process takes its part of what it was given.
    lengths = ["3 in rank 0", "5 in rank 1"] if size == 2 else ["2 in rank 0", "3 in rank 1", "4 in rank 2"]
    causes = {
        "window": "gradient accumulation",
        "period": "a length or a period that is not in epochs",
        "schedule": "a schedule over the run",
    }
    for each in results[size]:
        found = each["unequal_lengths"]
        assert found.keys() == causes.keys()
        for name, cause in causes.items():
            start = f"{cause} needs training data with as many batches in every process, got {' and '.join(lengths)};"
            assert found[name].startswith(start)


@sizes
def test_lengths_are_compared_in_every_epoch(results: Results, size: int) -> None:
    for each in results[size]:
        found = each["lengths_that_change"]
        assert (found["epoch"], found["records"]) == (3, 3 * 48 - (48 // size - 8))


@sizes
def test_models_that_several_processes_cannot_train_are_rejected(results: Results, size: int) -> None:
    assert results[1][0]["impossible_models"] == {}
    for each in results[size]:
        found = each["impossible_models"]
        for layer in ("DDPTrainer", "FSDPTrainer"):
            assert found[f"lazy {layer}"].startswith("module '1' (LazyLinear) has no weights before its first batch")
        assert "(SparseAdam) cannot work in several processes" in found["sparse optimizer DDPTrainer"]
        assert found["sparse optimizer FSDPTrainer"].startswith("module '0' (Embedding) computes sparse gradients")
        # Copies of a model average sparse gradients as dense ones.
        assert "sparse DDPTrainer" not in found


@sizes
def test_a_stop_request_in_one_process_stops_all_at_the_same_update(results: Results, size: int) -> None:
    first, *others = [each["stop"] for each in results[size]]
    assert all(other == first for other in others)
    (reason, after_steps), (_, after_epochs) = first
    assert reason == "enough"
    assert after_steps["updates"] == 4
    assert after_epochs["epoch"] == 1


@sizes
def test_all_stop_together_although_one_process_is_at_its_end(results: Results, size: int) -> None:
    """With three processes, the next step is the last one of the others, so the epoch is complete."""
    for each in results[size]:
        found = each["stop_at_the_end_of_one_process"]
        assert (found["batches"], found["epoch"]) == (5, 0 if size == 2 else 1)


@sizes
def test_every_process_draws_different_noise(results: Results, size: int) -> None:
    assert len({each["different_noise"] for each in results[size]}) == size


@sizes
def test_only_the_first_process_writes_files_saved_after_a_run(results: Results, size: int) -> None:
    assert [each["written_after_a_run"] for each in results[size]] == [True] + [False] * (size - 1)


@sizes
def test_resumed_equals_uninterrupted_with_dropout_in_every_process(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["resumed"]["halves"] == each["resumed"]["whole"]


@sizes
def test_only_one_process_writes_checkpoints(results: Results, size: int) -> None:
    files = results[size][0]["resumed"]["files"]
    assert "best_ck" in files
    assert not [name for name in files if name.startswith(".")]


@sizes
def test_a_last_write_that_fails_with_a_warning_does_not_end_the_run(results: Results, size: int) -> None:
    found = [each["last_write_fails"] for each in (*results[1], *results[size])]
    assert [each["epoch"] for each in found] == [1] * (1 + size)
    # The first process tries again at the end of training, as a single process does.
    assert [len(each["failed"]) for each in found] == [2, 2] + [0] * (size - 1)
    assert all("ck_epoch_1_iter_2: not a checkpoint" in it for each in found for it in each["failed"])


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_processes_continues_the_epoch(results: Results, size: int) -> None:
    begun = [sample for each in results[2] for sample in each["other_world_size"]["samples"]]
    rest = [sample for each in results[size] for sample in each["other_world_size"]["samples"]]
    assert len(begun) == 16
    assert len(set(begun + rest)) == len(begun + rest) == 29
    assert results[size][0]["other_world_size"]["progress"]["epoch"] == 1


@pytest.mark.parametrize("size", [1, 3])
def test_the_mean_of_a_continued_epoch_counts_the_samples_of_all_processes(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["mean_of_a_continued_epoch"] == nearly(results[2][0]["mean_of_a_continued_epoch"], 1e-12)


@sizes
def test_a_layer_adds_at_most_eight_python_calls_to_a_step(results: Results, size: int) -> None:
    bare = results[1][0]["python_calls"]["all"]
    for each in results[size]:
        found = each["python_calls"]
        assert found["all"] - bare <= 8
        assert found["amp"] <= 8


@sizes
def test_a_new_run_discards_a_step_interrupted_by_an_error(results: Results, size: int) -> None:
    assert [each["a_new_run_after_an_error_inside_a_step"] for each in results[size]] == [48] * size


@sizes
def test_an_error_in_one_process_is_named_in_the_others(results: Results, size: int) -> None:
    *others, last = [each["error_in_one_process"] for each in results[size]]
    assert last == ["ArithmeticError", "the last process has had enough"]
    expected = f"rank {size - 1} failed: ArithmeticError: the last process has had enough"
    assert others == [["PeerError", expected]] * (size - 1)
