"""Differential privacy in a real group of two processes against one process on the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opacus", reason="the extra 'privacy' is not installed")

pytestmark = [pytest.mark.slow]

SCRIPT = Path(__file__).with_name("private_ranks.py")
Results = list[dict[str, Any]]


@pytest.fixture(scope="session")
def results(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run every case once, and return the results by rank."""
    found: Results = run_group(SCRIPT, 2, tmp_path_factory.mktemp("private"))
    return found


def assert_agree(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["weights"] == pytest.approx(expected["weights"], rel=0, abs=1e-12)
    for name in ("epsilon", "noise", "spent", "progress"):
        assert found[name] == expected[name], name


CASES = [
    "even_batches",
    "uneven_batches",
    "less_data_than_processes",
    "without_noise",
    "accumulated_batches",
    "poisson_sampling",
    "empty_draw",
    "target_epsilon",
]


@pytest.mark.parametrize("order", ["privacy_outside", "privacy_inside"])
@pytest.mark.parametrize("name", CASES)
def test_two_private_processes_train_and_spend_as_one(results: Results, name: str, order: str) -> None:
    assert_agree(results[0][name][order], results[0][name]["alone"])


@pytest.mark.parametrize("order", ["privacy_outside", "privacy_inside"])
@pytest.mark.parametrize("name", CASES)
def test_both_processes_have_the_same_weights_bit_for_bit(results: Results, name: str, order: str) -> None:
    assert results[0][name][order] == results[1][name][order]


def test_a_rate_counts_the_samples_of_both_processes(results: Results) -> None:
    assert results[1]["even_batches"]["privacy_outside"]["spent"] == [[1.0, 12 / 48, 4]]
    assert results[1]["accumulated_batches"]["privacy_outside"]["spent"] == [[1.0, 24 / 60, 3]]


def test_unseeded_noise_is_equal_in_both_processes_and_differs_per_run(results: Results) -> None:
    (first, second), others = (each["seed_of_the_system"] for each in results)
    assert others == [first, second]
    assert first != second


@pytest.mark.parametrize("order", ["privacy_outside", "privacy_inside"])
def test_a_resumed_private_group_equals_an_uninterrupted_one(results: Results, order: str) -> None:
    for each in results:
        whole, resumed = each["resumed"][order]
        assert resumed == whole


def test_one_process_resumes_a_private_run_of_two(results: Results) -> None:
    whole, rest = results[0]["resumed_alone"]
    assert_agree(rest, whole)


def test_the_private_group_is_built_by_name_with_the_settings_of_pymarlin(results: Results) -> None:
    assert results[0]["built_by_name"] == {"norm": 0.5, "spent": [[1.0, 12 / 48, 4]]}


def test_a_sampler_that_can_repeat_samples_is_rejected(results: Results) -> None:
    assert results[1]["distributed_sampler"].startswith("differential privacy and a DistributedSampler")
