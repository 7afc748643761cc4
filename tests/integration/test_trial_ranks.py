"""Trials in several processes against one: the same script with one and with two slots."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

SCRIPT = Path(__file__).with_name("trial_ranks.py")
EXAMPLES = Path(__file__).parents[2] / "examples" / "trial"
Results = dict[int, list[dict[str, Any]]]


def launch(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dovetail.launch", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def results(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return {size: run_group(SCRIPT, size, tmp_path_factory.mktemp(f"slots{size}")) for size in (1, 2)}


def close(one: Any, other: Any) -> None:
    """Compare nested numbers to 1e-12."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            close(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            close(left, right)
    else:
        assert one == pytest.approx(other, abs=1e-12)


@pytest.mark.parametrize("case", ["plain", "shuffled"])
def test_two_slots_train_as_one(results: Results, case: str) -> None:
    alone = results[1][0][case]
    for rank in range(2):
        shared = results[2][rank][case]
        for part in ("weights", "metrics", "predictions"):
            close(shared[part], alone[part])
        assert shared["batches"] == alone["batches"]


def test_reports_are_means_over_all_slots(results: Results) -> None:
    assert results[2][0]["plain"]["reports"] == results[2][1]["plain"]["reports"]
    close(results[2][0]["plain"]["reports"], results[1][0]["plain"]["reports"])


def test_every_slot_has_the_same_weights_and_metrics(results: Results) -> None:
    for case in ("plain", "shuffled", "aggregated", "full dataset", "stopped", "straight", "paused"):
        first, *others = [each[case] for each in results[2]]
        for other in others:
            for part in ("weights", "metrics", "batches", "predictions"):
                assert other[part] == first[part], f"{case}: {part}"


def test_metrics_count_every_sample_once(results: Results) -> None:
    assert results[2][0]["plain"]["metrics"]["rows"] == results[1][0]["plain"]["metrics"]["rows"]


def test_predictions_are_in_order_and_without_duplicates(results: Results) -> None:
    assert len(results[2][0]["plain"]["predictions"]) == 9


def test_one_slot_evaluates_the_full_dataset_for_all(results: Results) -> None:
    close(results[2][0]["full dataset"]["metrics"], results[1][0]["full dataset"]["metrics"])


def test_aggregated_batches_agree_across_slots(results: Results) -> None:
    # One slot has 6 batches of 8 in an epoch and two slots 6 steps of 2 times 4: the same windows.
    close(results[2][0]["aggregated"]["weights"], results[1][0]["aggregated"]["weights"])


def test_a_stop_request_of_one_slot_stops_all_and_leaves_a_checkpoint(results: Results) -> None:
    assert [each["stopped"]["batches"] for each in results[2]] == [8, 8]
    assert results[2][0]["kept"] == ["ck_epoch_1_iter_8"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_paused_and_resumed_equals_an_uninterrupted_one(results: Results, size: int) -> None:
    for each in results[size]:
        assert each["paused"]["weights"] == each["straight"]["weights"]


def test_slots_know_their_ranks_and_exchange_messages(results: Results) -> None:
    assert [each["places"] for each in results[2]] == [
        {"rank": 0, "size": 2, "gathered": [0, 10], "told": "chief", "share": 4},
        {"rank": 1, "size": 2, "gathered": None, "told": "chief", "share": 4},
    ]


@pytest.mark.usefixtures("forking")
def test_the_scripts_of_the_seed_document_train_and_predict(tmp_path: Path) -> None:
    config = ("--config", str(EXAMPLES / "const.yaml"), "--slots", "2")
    output = launch(*config, str(EXAMPLES / "train.py"), folder=tmp_path)
    loss = float(output.splitlines()[-1].removeprefix("result: validation loss "))
    assert loss < 1e-3
    inference = ("--config", str(EXAMPLES / "batch_inference.yaml"), "--slots", "2")
    output = launch(*inference, str(EXAMPLES / "batch_inference.py"), folder=tmp_path)
    assert output.splitlines()[-1].startswith("result: losses of 4 batches, the largest 0.000")
