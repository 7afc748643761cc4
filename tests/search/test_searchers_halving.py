from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.search.searchers import AsyncHalving, Bracket, adaptive_brackets, make_searcher, read_searcher, rung_units
from dovetail.search.space import Space

STUDY: Any = None  # not read


@pytest.mark.parametrize(
    ("mode", "brackets"),
    [
        ("aggressive", [(4, 64, 16)]),
        ("standard", [(4, 45, 6), (3, 14, 5), (2, 5, 5)]),
        ("conservative", [(4, 43, 4), (3, 14, 4), (2, 5, 4), (1, 2, 4)]),
    ],
)
def test_the_brackets_of_a_mode_equal_determined(mode: Any, brackets: list[tuple[int, int, int]]) -> None:
    assert adaptive_brackets(64, 100, mode=mode) == brackets


def test_the_rungs_of_a_bracket_equal_determined() -> None:
    assert rung_units(4, 100, 4) == [1, 6, 25, 100]


def test_one_trial_gives_one_bracket_with_one_rung() -> None:
    assert adaptive_brackets(1, 100, mode="conservative") == [(1, 1, 16)]


def test_integer_logarithms_are_exact() -> None:
    # The logarithm of 125 with base 5 is 2.9999999999999996 in floats.
    assert adaptive_brackets(125, 125, mode="aggressive", divisor=5) == [(4, 125, 16)]


@pytest.mark.parametrize(
    ("mode", "brackets"),
    [
        ("aggressive", [(4, 64, 64)]),
        ("standard", [(4, 45, 5), (3, 14, 5), (2, 5, 5)]),
        ("conservative", [(4, 43, 4), (3, 14, 4), (2, 5, 4), (1, 2, 4)]),
    ],
)
def test_brackets_without_a_limit_run_as_many_trials_as_determined(
    mode: Any, brackets: list[tuple[int, int, int]]
) -> None:
    assert adaptive_brackets(64, 100, mode=mode, max_concurrent_trials=0) == brackets


def test_brackets_may_be_configured() -> None:
    assert [bracket.num_rungs for bracket in adaptive_brackets(64, 100, bracket_rungs=[2, 4])] == [4, 2]


@given(
    st.integers(1, 500),
    st.integers(1, 10**6),
    st.integers(2, 10),
    st.integers(1, 8),
    st.integers(1, 40),
    st.lists(st.integers(1, 6), max_size=6),
    st.sampled_from(["aggressive", "standard", "conservative"]),
)
def test_all_trials_are_divided_among_brackets(
    trials: int, time: int, divisor: int, rungs: int, concurrent: int, named: list[int], mode: Any
) -> None:
    brackets = adaptive_brackets(
        trials,
        time,
        mode=mode,
        divisor=divisor,
        max_rungs=rungs,
        max_concurrent_trials=concurrent,
        bracket_rungs=named,
    )
    assert sum(bracket.max_trials for bracket in brackets) == trials
    assert all(min(bracket) >= 1 for bracket in brackets)
    if len(brackets) <= concurrent:
        assert sum(bracket.max_concurrent_trials for bracket in brackets) == concurrent


def test_a_trial_continues_if_it_is_in_the_best_quarter() -> None:
    rule = AsyncHalving([Bracket(2, 9, 9)], max_time=4, divisor=4)
    # One may continue until the eighth arrives, then two. Among equals the newer is better.
    values = [0.5, 0.6, 0.4, 0.45, 0.4, 0.9, 0.3, 0.39, 0.35]
    assert [rule.report(number, 1, value) for number, value in enumerate(values)] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("divisor", "values", "expected"),
    [
        # Each new value is inserted before its equals, so that it is the best so far.
        (4, [1.0, 1.0, 1.0, 1.0, 1.0], [True, True, True, True, True]),
        (4, [0.5, 0.7, 0.5, 0.7, 0.6], [True, False, True, False, False]),
        # Of four values two continue: 0.2 is at position 1, before the other 0.2.
        (2, [0.1, 0.2, 0.3, 0.2], [True, False, False, True]),
        (3, [-0.9, -0.9, -0.8, -0.9], [True, True, False, True]),
    ],
)
def test_among_equal_values_the_newer_is_better_as_in_determined(
    divisor: int, values: list[float], expected: list[bool]
) -> None:
    rule = AsyncHalving([Bracket(2, 9, 9)], max_time=4, divisor=divisor)
    assert [rule.report(number, 4 // divisor, value) for number, value in enumerate(values)] == expected


def test_trials_without_a_number_rank_as_failed_ones() -> None:
    space = Space({})
    given = {"name": "async_halving", "metric": "loss", "num_rungs": 2, "max_trials": 9, "max_time": 4}
    searcher = make_searcher(read_searcher({**given, "time_metric": "batches"}), space, seed=0)
    for number in range(3):
        searcher.suggest(STUDY, number)
    searcher.on_exit(0, "ERROR")
    assert [searcher.on_validation(number, 1, float("nan")) for number in (1, 2)] == [False, False]


def test_one_report_may_pass_several_rungs() -> None:
    rule = AsyncHalving([Bracket(3, 3, 3)], max_time=16, divisor=4)
    assert rule.report(0, 5, 0.5)
    assert [[len(rung) for rung in rungs] for rungs in rule.state_dict()["rungs"]] == [[1, 1, 0]]
    # Better than at the first rung only counts if it holds at the second.
    assert rule.report(1, 1, 0.4)
    assert not rule.report(1, 4, 0.6)


def test_a_report_between_two_rungs_has_no_effect() -> None:
    rule = AsyncHalving([Bracket(2, 3, 3)], max_time=16, divisor=4)
    assert rule.report(0, 4, 0.1)
    assert rule.report(0, 8, 9.9)
    assert rule.report(1, 3, 9.9)


def test_every_trial_ends_at_the_last_rung() -> None:
    rule = AsyncHalving([Bracket(1, 3, 3)], max_time=10, divisor=4)
    assert rule.report(0, 9, 0.1)
    assert not rule.report(0, 10, 0.1)


def test_a_stopped_trial_is_not_counted_again() -> None:
    rule = AsyncHalving([Bracket(3, 3, 3)], max_time=16, divisor=4)
    assert rule.report(0, 1, 0.1)
    assert not rule.report(1, 1, 0.2)
    state = rule.state_dict()
    assert not rule.report(1, 16, 0.0)
    assert rule.state_dict() == state


def test_repeated_reports_after_a_restart_are_not_counted_again() -> None:
    rule = AsyncHalving([Bracket(3, 3, 3)], max_time=16, divisor=4)
    assert rule.report(0, 4, 0.1)
    state = rule.state_dict()
    assert rule.report(0, 1, 0.3)
    assert rule.state_dict() == state


def test_a_failed_trial_counts_as_worst_at_later_rungs() -> None:
    rule = AsyncHalving([Bracket(2, 9, 9)], max_time=2, divisor=2)
    for number in range(3):
        rule.admit(number)
        rule.leave(number, "ERROR")
    # Three are there already, so the fourth to come may be second best.
    assert [rule.report(3, 1, 0.5), rule.report(4, 1, 0.6)] == [True, True]


@pytest.mark.parametrize("state", ["COMPLETED", "STOPPED", "CANCELED"])
def test_a_trial_that_ends_without_a_report_does_not_count_at_a_rung(state: Any) -> None:
    rule = AsyncHalving([Bracket(2, 9, 9)], max_time=2, divisor=2)
    for number in range(3):
        rule.admit(number)
        rule.leave(number, state)
    assert [rule.report(3, 1, 0.5), rule.report(4, 1, 0.6)] == [True, False]


def test_an_invalid_trial_is_removed_from_its_bracket() -> None:
    rule = AsyncHalving([Bracket(2, 9, 9)], max_time=4, divisor=4)
    assert rule.report(0, 1, 0.1)
    rule.leave(0, "INVALID_HP")
    assert rule.report(1, 1, 0.9)


def test_rungs_with_equal_times_are_merged() -> None:
    rule = AsyncHalving([Bracket(5, 9, 9)], max_time=16, divisor=4)
    assert [len(rungs) for rungs in rule.state_dict()["rungs"]] == [3]


def test_brackets_are_filled_in_order_and_refilled_when_a_trial_ends() -> None:
    rule = AsyncHalving([Bracket(2, 4, 2), Bracket(1, 3, 1)], max_time=4, divisor=4)
    assert [rule.admit(number)["bracket"] for number in range(3)] == [0, 0, 1]
    rule.leave(2, "STOPPED")
    assert rule.admit(3) == {"bracket": 1}
    rule.leave(0, "STOPPED")
    assert rule.admit(4) == {"bracket": 0}


def test_a_bracket_without_further_trials_frees_its_slots() -> None:
    rule = AsyncHalving([Bracket(2, 1, 1), Bracket(1, 3, 1)], max_time=4, divisor=4)
    assert [rule.admit(number)["bracket"] for number in range(4)] == [0, 1, 1, 1]


def test_trials_of_different_brackets_are_not_compared() -> None:
    rule = AsyncHalving([Bracket(2, 1, 1), Bracket(2, 1, 1)], max_time=4, divisor=4)
    rule.admit(0)
    rule.admit(1)
    assert [rule.report(0, 1, 0.1), rule.report(1, 1, 0.9)] == [True, True]


@pytest.mark.parametrize("cut", [0, 1, 7, 30, 59])
def test_decisions_are_equal_after_loading_a_state(cut: int) -> None:
    def events() -> list[tuple[Any, ...]]:
        chance = random.Random(5)
        return [(chance.randrange(12), chance.randrange(20), chance.random(), chance.random() < 0.1) for _ in range(60)]

    def rule() -> AsyncHalving:
        return AsyncHalving([Bracket(3, 8, 2), Bracket(2, 4, 2)], max_time=16, divisor=3)

    def play(rule: AsyncHalving, events: list[tuple[Any, ...]]) -> list[bool]:
        found = []
        for number, time, value, fails in events:
            found.append(rule.report(number, time, value))
            if fails:
                rule.leave(number, "ERROR")
        return found

    straight, first, second = rule(), rule(), rule()
    expected = play(straight, events())
    before = play(first, events()[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + play(second, events()[cut:]) == expected
    assert second.state_dict() == straight.state_dict()


def test_a_loaded_state_is_a_copy() -> None:
    rule, other = (AsyncHalving([Bracket(2, 9, 9)], max_time=4, divisor=4) for _ in range(2))
    rule.report(0, 1, 0.1)
    state = rule.state_dict()
    other.load_state_dict(state)
    other.report(1, 1, 0.2)
    assert state == rule.state_dict()


def test_hyperband_has_a_bracket_for_every_number_of_rungs() -> None:
    config = read_searcher({"name": "hyperband", "metric": "loss", "max_trials": 81, "max_length": {"epochs": 81}})
    searcher = make_searcher(config, Space({}), seed=0)
    suggested = [searcher.suggest(STUDY, number) for number in range(81)]
    counts = [
        sum(suggestion is not None and suggestion.attributes["bracket"] == bracket for suggestion in suggested)
        for bracket in range(5)
    ]
    # In proportion to 3^4/5, 3^3/4, 3^2/3, 3/2 and 1, the rest to the first.
    assert counts == [48, 19, 8, 4, 2]
