"""Whose updates count, and which of them are of use."""

from __future__ import annotations

import math
import timeit
from typing import Any

import pytest
import torch

from dovetail.federated.messages import Update
from dovetail.federated.validation import MAX_SAMPLES, admit, check_update

WEIGHTS = {"w": torch.zeros(2, 3), "b": torch.zeros(3), "steps": torch.tensor(0)}
GOOD = {"w": torch.ones(2, 3), "b": torch.ones(3), "steps": torch.tensor(4)}


def problem(num_samples: Any = 10, **changes: Any) -> tuple[str, str] | None:
    delta = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    fault = check_update(Update(7, 3, num_samples, delta=delta), WEIGHTS)
    if fault is None:
        return None
    assert (fault.client_id, fault.round) == (7, 3)
    assert fault.reason.startswith("client 7: ")
    return fault.kind, fault.reason.removeprefix("client 7: ")


def test_a_valid_update_has_no_fault() -> None:
    assert problem() is None
    assert problem(num_samples=0) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_values_that_are_not_finite_are_named(bad: float, place: tuple[int, int]) -> None:
    value = torch.ones(2, 3)
    value[place] = bad
    assert problem(w=value) == ("not finite", "'w' is not finite")


def test_opposite_infinities_do_not_hide_each_other() -> None:
    value = torch.tensor([math.inf, -math.inf, 0.0])
    assert problem(b=value) == ("not finite", "'b' is not finite")


def test_large_numbers_are_finite() -> None:
    assert problem(w=torch.full((2, 3), 3e38), b=torch.full((3,), -3e38)) is None


def test_shapes_dtypes_and_names_are_validated() -> None:
    assert problem(w=torch.ones(3, 2)) == ("wrong shape", "'w': expected the shape [2, 3], got [3, 2]")
    assert problem(w=torch.ones(6)) == ("wrong shape", "'w': expected the shape [2, 3], got [6]")
    assert problem(b=torch.ones(3).double()) == ("wrong shape", "'b': expected torch.float32, got torch.float64")
    assert problem(b=torch.ones(3).long()) == ("wrong shape", "'b': expected torch.float32, got torch.int64")
    assert problem(b=None) == ("wrong shape", "'b' is missing")
    assert problem(c=torch.ones(3)) == ("wrong shape", "'c' was not requested")


def test_means_of_integers_may_be_fractions() -> None:
    assert problem(steps=torch.tensor(2.5, dtype=torch.float64)) is None
    assert problem(steps=torch.tensor(math.nan)) == ("not finite", "'steps' is not finite")


@pytest.mark.parametrize("count", [-1, MAX_SAMPLES + 1, True, 1.5, math.nan])
def test_invalid_sample_counts_are_rejected(count: Any) -> None:
    kind, reason = problem(num_samples=count) or ("", "")
    assert kind == "wrong shape"
    assert reason == f"num_samples: expected a whole number from 0 to 1e+12, got {count!r}"


@pytest.mark.parametrize("count", [-1, True, 1.5])
def test_invalid_update_counts_are_rejected(count: Any) -> None:
    fault = check_update(Update(7, 3, 1, num_updates=count, delta=GOOD), WEIGHTS)
    assert fault is not None
    assert fault.reason == f"client 7: num_updates: expected a whole number from 0 to 1e+12, got {count!r}"


def test_an_update_without_tensors_fits_empty_weights() -> None:
    assert check_update(Update(1, 1, 1), {}) is None


def outcome(reports: list[tuple[int, int]], expected: list[int], current: int, **how: int) -> tuple[Any, Any]:
    updates = [Update(client, current_round, n) for n, (client, current_round) in enumerate(reports)]
    accepted, faults = admit(updates, expected, current, **how)
    return [update.num_samples for update in accepted], [(fault.client_id, fault.kind) for fault in faults]


def test_reports_are_accepted_in_the_given_order() -> None:
    assert outcome([(3, 5), (1, 5), (2, 5)], [1, 2, 3], 5) == ([0, 1, 2], [])


def test_the_first_report_is_used_and_the_second_is_a_fault() -> None:
    assert outcome([(1, 5), (2, 5), (1, 5), (1, 5)], [1, 2], 5) == ([0, 1], [(1, "duplicate"), (1, "duplicate")])


def test_a_report_for_an_earlier_round_is_late() -> None:
    assert outcome([(1, 4), (2, 5)], [1, 2], 5) == ([1], [(1, "late")])


def test_a_late_report_does_not_make_the_current_one_a_duplicate() -> None:
    assert outcome([(1, 4), (1, 5)], [1], 5) == ([1], [(1, "late")])


def test_reports_may_be_as_stale_as_the_server_allows() -> None:
    reports = [(1, 5), (2, 4), (3, 3), (4, 2)]
    assert outcome(reports, [1, 2, 3, 4], 5, max_staleness=2) == ([0, 1, 2], [(4, "late")])


def test_reports_of_future_rounds_and_unknown_clients_are_faults() -> None:
    assert outcome([(1, 6), (9, 5)], [1], 5) == ([], [(1, "late"), (9, "duplicate")])


def test_fault_reasons_are_sentences() -> None:
    _, faults = admit([Update(1, 4, 1), Update(2, 5, 1), Update(2, 5, 1), Update(9, 5, 1)], [1, 2], 5)
    assert [fault.reason for fault in faults] == [
        "client 1 reported for round 4 in round 5",
        "client 2 reported twice in round 5",
        "client 9 reported in round 5, but was not selected",
    ]


def test_validating_costs_little_more_than_one_pass_over_the_values() -> None:
    shapes = [(300, 300), (300,), (30, 300), (30,), (10, 30), (10,)]
    weights = {str(n): torch.randn(shape) for n, shape in enumerate(shapes)}
    update = Update(1, 1, 1, delta=weights)

    def seconds(work: Any) -> float:
        return min(timeit.repeat(work, number=20, repeat=20)) / 20

    # The same in five separate passes per tensor would be more than twice as much. Ratios hold on a busy machine.
    checked = seconds(lambda: check_update(update, weights))
    looked = seconds(lambda: [bool(value.isfinite().all()) for value in weights.values()])
    assert checked < 2 * looked
