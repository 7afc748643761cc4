"""Gradients that are sent during the backward pass against those sent after it: a real gloo group of two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

SCRIPT = Path(__file__).with_name("overlap_ranks.py")


@pytest.fixture(scope="session")
def results(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_group(SCRIPT, 2, tmp_path_factory.mktemp("overlap"))
    return found


OVERLAPPED = [
    "even",
    "uneven_and_timed",
    "windows_that_end_early",
    "idle_inside_a_window",
    "less_data_than_processes",
    "counted_items",
    "counted_items_in_windows",
    "float16",
    "two_optimizers",
    "gradients_changed_after_they_were_sent",
    "unused_parameters",
    "unused_parameters_in_the_last_messages",
    "hooks_of_gradients",
    "freezing",
    "stop_requests",
]
# Code of the user may change a gradient between its completion and the average.
SENT_AFTERWARDS = [
    "two_passes_by_hand",
    "hooks_of_parameters",
    "a_layer_that_changes_gradients",
    "a_backward_pass_that_changes_gradients",
]


@pytest.mark.parametrize("name", [*OVERLAPPED, *SENT_AFTERWARDS, "by_hand_in_one_process_only"])
def test_sending_during_backward_gives_the_same_bits_as_after_it(results: list[dict[str, Any]], name: str) -> None:
    for each in results:
        assert each[name]["many"] == each[name]["one"]
        assert each[name]["before"] == 0
    assert results[0][name]["many"][0] == results[1][name]["many"][0]


@pytest.mark.parametrize("name", OVERLAPPED)
def test_gradients_are_sent_before_the_backward_pass_ends(results: list[dict[str, Any]], name: str) -> None:
    assert all(max(each[name]["early"]) > 0 for each in results)


@pytest.mark.parametrize("name", SENT_AFTERWARDS)
def test_gradients_that_may_change_are_sent_after_backward(results: list[dict[str, Any]], name: str) -> None:
    assert all(max(each[name]["early"]) == 0 for each in results)


def test_a_process_may_send_early_while_another_does_not(results: list[dict[str, Any]]) -> None:
    assert [max(each["by_hand_in_one_process_only"]["early"]) for each in results] == [3, 0]


def test_inside_an_accumulation_window_nothing_is_sent(results: list[dict[str, Any]]) -> None:
    # Nine batches per epoch, two processes: windows of three steps and of two.
    assert results[1]["windows_that_end_early"]["early"] == [0, 0, 3, 0, 0, 0, 0, 3, 0, 0]


def test_a_process_that_changed_a_sent_gradient_stops_sending_early(results: list[dict[str, Any]]) -> None:
    name = "gradients_changed_after_they_were_sent"
    assert [each[name]["early"][:7] for each in results] == [[2, 2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 1, 1, 1]]


def test_overlapped_training_has_the_bits_of_a_plain_torch_loop(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert each["plain_torch"]["trained"] == each["plain_torch"]["expected"]
        assert each["plain_torch"]["early"] == [3] * 5


@pytest.mark.parametrize("name", ["bf16", "fp16", "powersgd"])
def test_compressed_gradients_give_equal_weights_in_all_processes(results: list[dict[str, Any]], name: str) -> None:
    first, second = (each["compression"][name][0] for each in results)
    full = results[0]["compression"]["none"][0]
    assert first == second != full
    assert first == results[0]["compression_with_one_message"][name][0]
    assert first == pytest.approx(full, rel=0, abs={"bf16": 2e-2, "fp16": 2e-3, "powersgd": 0.1}[name])


@pytest.mark.parametrize("name", ["fp16", "powersgd"])
def test_resumed_equals_uninterrupted_with_compression(results: list[dict[str, Any]], name: str) -> None:
    for each in results:
        whole, halves = each["compression_resumed"][name]
        assert whole == halves


@pytest.mark.parametrize("name", ["bf16", "fp16", "powersgd"])
def test_freezing_an_unused_parameter_does_not_change_compression(results: list[dict[str, Any]], name: str) -> None:
    for each in results:
        always, frozen = each["compression_after_freezing"][name]
        assert frozen == always


def test_powersgd_of_the_full_rank_omits_only_rounding(results: list[dict[str, Any]]) -> None:
    for each in results:
        full, compressed = each["enough_ranks_lose_nothing"]
        assert compressed == pytest.approx(full, rel=0, abs=1e-4)
        assert compressed != full


def test_a_process_that_ends_inside_backward_is_named_in_time(results: list[dict[str, Any]]) -> None:
    message, seconds = results[0]["a_process_that_ends_inside_backward"]
    assert message == "rank 1 is gone"
    assert seconds < 10
