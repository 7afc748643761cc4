"""A model in parts against the same model in one process: real gloo groups of 2 and 3, started as torchrun does."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail import Epochs, checkpoint
from dovetail.callbacks import EMA, SWA
from dovetail.errors import CheckpointError, ConfigError
from dovetail.trainers import FSDPTrainer, Trainer, build_trainer

pytestmark = [pytest.mark.slow]

SCRIPT = Path(__file__).with_name("sharded_ranks.py")
Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="session")
def results(run_group: Any, folder: Path) -> Results:
    # In this order: one and three processes continue the run of two.
    return {size: run_group(SCRIPT, size, folder / str(size)) for size in (2, 3, 1)}


def nearly(expected: Any, tolerance: float) -> Any:
    return pytest.approx(expected, rel=0, abs=tolerance)


sizes = pytest.mark.parametrize("size", [2, 3])


@sizes
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("even_batches", 1e-12),
        ("uneven_batches", 1e-12),
        ("clipping", 1e-12),
        ("accumulation", 1e-12),
        ("accumulation_that_some_finish_early", 1e-12),
        ("less_data_than_processes", 1e-12),
        ("synced_norms", 1e-12),
        ("adamw", 1e-10),
        ("optimizer_made_before", 1e-10),
        ("add_on_and_other_blocks", 1e-12),
        ("tied_weights", 1e-12),
        ("evaluated_before_and_trained_twice", 1e-12),
    ],
)
def test_a_sharded_model_trains_as_one_process(results: Results, name: str, tolerance: float, size: int) -> None:
    alone = results[1][0][name]
    for each in results[size]:
        assert each[name]["weights"] == nearly(alone["weights"], tolerance)
        assert each[name]["metrics"] == nearly(alone["metrics"], tolerance)
        assert each[name]["progress"] == alone["progress"]


@sizes
def test_recomputed_blocks_give_the_bits_of_a_sharded_run_without_them(results: Results, size: int) -> None:
    for each in results[size]:
        found = each["recomputed_blocks"]
        assert found["recomputed"] == [found["stored"]] * 2


@sizes
def test_inputs_of_a_backward_pass_are_rejected(results: Results, size: int) -> None:
    assert results[1][0]["inputs_of_a_backward_pass"] is None
    for each in results[size]:
        assert each["inputs_of_a_backward_pass"].startswith("inputs: a sharded parameter is not in the graph")


@sizes
def test_a_loss_is_weighted_by_its_items(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["counted_items"]["weights"] == nearly(results[1][0]["counted_items"]["weights"], 1e-12)


@sizes
@pytest.mark.parametrize("name", ["windows_without_items", "gradients_that_are_averaged_twice"])
def test_every_gradient_counts_once(results: Results, name: str, size: int) -> None:
    for each in results[size]:
        for found, expected in zip(each[name], results[1][0][name], strict=True):
            assert found == nearly(expected, 1e-12)


@sizes
@pytest.mark.parametrize(
    ("name", "tolerance"), [("norm", 1e-6), ("largest", 1e-6), ("value", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
def test_norms_count_parts_and_plain_parameters_once(results: Results, name: str, tolerance: float, size: int) -> None:
    for each in results[size]:
        expected = results[1][0]["criterion_with_weights"][name]
        assert each["criterion_with_weights"][name] == nearly(expected, tolerance)


@sizes
def test_averaged_weights_and_logged_norms_equal_the_unsharded_model(results: Results, size: int) -> None:
    alone = results[1][0]["averages_and_logged_clipping"]
    for each in results[size]:
        found = each["averages_and_logged_clipping"]
        assert torch.tensor(found["weights"][0]).sub(torch.tensor(alone["weights"][0])).abs().max() <= 1e-12
        assert found["weights"][1] == nearly(alone["weights"][1], 1e-12)
        assert found["metrics"] == nearly(alone["metrics"], 1e-12)


@sizes
def test_two_optimizers_work_over_separately_called_blocks(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["two_optimizers"] == nearly(results[1][0]["two_optimizers"], 1e-12)


@sizes
def test_a_window_sends_the_gradients_of_blocks_that_its_last_batch_skips(results: Results, size: int) -> None:
    alone = results[1][0]["window_whose_last_batch_skips_a_block"]
    for each in results[size]:
        found = each["window_whose_last_batch_skips_a_block"]
        assert found["weights"] == nearly(alone["weights"], 1e-12)
        # The model as a whole is called after its blocks were called directly.
        assert torch.tensor(found["predicted"]).sub(torch.tensor(alone["predicted"])).abs().max() <= 1e-12


@sizes
def test_float16_with_accumulation_and_clipping_agrees_with_one_process(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["low_precision"]["weights"] == nearly(results[1][0]["low_precision"]["weights"], 2e-3)


@sizes
def test_an_overflow_in_one_process_skips_the_step_in_all(results: Results, size: int) -> None:
    assert [each["overflow_in_one_process"] for each in results[size]] == [[2, 32768.0]] * size


@sizes
@pytest.mark.parametrize("name", ["evaluation", "prediction"])
def test_every_sample_of_a_pass_is_counted_once(results: Results, name: str, size: int) -> None:
    for each in results[size]:
        for found, expected in zip(each[name], results[1][0][name], strict=True):
            if name == "evaluation":
                assert found == nearly(expected, 1e-12)
            else:
                assert torch.tensor(found).sub(torch.tensor(expected)).abs().max() <= 1e-12


@sizes
def test_each_process_holds_its_shard_of_weights_and_moments(results: Results, size: int) -> None:
    rows = {2: [50, 50], 3: [34, 34, 32]}[size]
    assert [each["held_elements"] for each in results[size]] == [[60 * number] * 2 for number in rows]


@sizes
def test_full_weights_are_exported_and_restored(results: Results, size: int) -> None:
    for each in results[size]:
        found = each["exported_weights"]
        assert found["loaded"] == found["trained"] != found["changed"]
        assert "this model is sharded; export 'safetensors'" in found["graph"]
    assert results[size][0]["exported_weights"]["same"] is True


@sizes
def test_resumed_equals_uninterrupted_with_dropout_in_every_process(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["resumed"]["halves"] == each["resumed"]["whole"]


@sizes
def test_every_process_writes_one_file_without_leftovers(results: Results, size: int) -> None:
    shards = [f"shard-{rank:05d}-of-{size:05d}.safetensors" for rank in range(size)]
    usual = ["shards.json", "state.json", "tensors.safetensors"]
    for each in results[size]:
        assert each["resumed"]["files"] == ["manifest.json", *shards, *usual]
        assert each["resumed"]["left over"] == []


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_processes_loads_the_same_weights_and_moments(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["other_world_size"] == results[2][0]["other_world_size"]


@sizes
def test_a_plain_checkpoint_is_loaded_into_shards(results: Results, size: int) -> None:
    for each in results[size]:
        found = each["started_by_a_plain_trainer"]
        assert found["loaded"] == found["plain"]
        assert found["before the run"] == found["in the run"]


@sizes
def test_a_damaged_shard_is_named_in_every_process_and_skipped(results: Results, size: int) -> None:
    for each in results[size]:
        found = each["damaged_shard"]
        file = f"ck_epoch_0_iter_4/shard-00001-of-{size:05d}.safetensors: the file is damaged"
        assert file in found["named"]
        assert any(file in warning for warning in found["warned"])
        assert found["batches"] == 3


@sizes
def test_an_error_in_one_process_is_named_in_the_others(results: Results, size: int) -> None:
    *others, last = [each["error_in_one_process"] for each in results[size]]
    assert last == ["ArithmeticError", "the last process has had enough"]
    expected = f"rank {size - 1} failed: ArithmeticError: the last process has had enough"
    assert others == [["PeerError", expected]] * (size - 1)


class Malicious:
    """Creates a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_a_pickled_index_is_rejected_and_never_executed(results: Results, folder: Path, tmp_path: Path) -> None:
    place, marker = folder / "begun_by_two", tmp_path / "executed"
    pickled = pickle.dumps(Malicious(marker))
    pickle.loads(pickled)
    assert marker.exists()
    marker.unlink()
    (place / ".metadata").write_bytes(pickled)
    try:
        with pytest.raises(CheckpointError, match=r"\.metadata: a file that does not belong to a checkpoint"):
            checkpoint.load(place)
    finally:
        (place / ".metadata").unlink()
    assert checkpoint.load(place)["progress"]["batches"] == 4
    assert not marker.exists()


@pytest.mark.usefixtures("forking")
def test_launched_processes_return_the_full_weights_and_averages() -> None:
    inputs = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = (inputs.sum(dim=1) > 0).long()

    def trained(batch_size: int, num_processes: int) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model: nn.Module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        averages = [EMA(decay=0.5), SWA(start=0)]
        trainer = FSDPTrainer(
            Trainer(
                model,
                "cpu",
                optim_function="AdamW",
                seed=1,
                batch_size=batch_size,
                drop_last=False,
                verbose=False,
                callbacks=averages,
            ),
            num_processes=num_processes,
        )
        trainer.fit((inputs, targets), max_length=Epochs(2))
        for average in averages:
            average.apply_to(twin := nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double())
            model = nn.ModuleList([model, twin])
        return list(model.parameters())

    for found, expected in zip(trained(4, 2), trained(8, 1), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_blocks_that_are_not_modules_are_rejected() -> None:
    with pytest.raises(ConfigError, match="shard: expected classes of modules"):
        build_trainer("fsdp", nn.Linear(2, 2), shard=["linear"])
