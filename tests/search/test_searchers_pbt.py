from __future__ import annotations

import json
from typing import Any

import pytest

from dovetail.search.searchers import PopulationBasedTraining
from dovetail.search.space import Space

SPACE = Space(
    {
        "lr": {"type": "log", "minval": -4, "maxval": -1},
        "depth": {"type": "int", "minval": 1, "maxval": 8},
        "act": {"type": "categorical", "vals": ["relu", "tanh"]},
    }
)
STUDY: Any = None  # not read


def population(size: int = 4, **options: Any) -> PopulationBasedTraining:
    searcher = PopulationBasedTraining(
        SPACE, 0, **{"max_time": 10, "population_size": size, "num_rounds": 5, "truncate_fraction": 0.25, **options}
    )
    for number in range(size):
        assert searcher.suggest(STUDY, number) is not None
    return searcher


def test_only_the_population_is_created_at_first() -> None:
    searcher = population()
    assert searcher.suggest(STUDY, 4) is None
    assert searcher.is_over()


def test_no_trial_ends_between_intervals() -> None:
    searcher = population()
    assert all(searcher.on_validation(number, 1, number) for number in range(4))


def test_the_worst_quarter_ends_and_copies_of_the_best_replace_it() -> None:
    searcher = population()
    assert [searcher.on_validation(number, 2, value) for number, value in enumerate([0.4, 0.2, 0.3])] == [True] * 3
    assert not searcher.on_validation(3, 2, 0.9)
    assert not searcher.is_over()
    successor = searcher.suggest(STUDY, 4)
    assert successor is not None
    assert (successor.source, successor.attributes) == (1, {"round": 1})
    assert searcher.is_over()


def test_a_trial_that_reported_early_is_not_ended_afterwards() -> None:
    searcher = population()
    assert [searcher.on_validation(number, 2, value) for number, value in enumerate([0.9, 0.2, 0.3, 0.4])] == [True] * 4


def test_a_copy_is_compared_from_the_next_interval_on() -> None:
    searcher = population()
    for number, value in enumerate([0.4, 0.2, 0.3, 0.9]):
        searcher.on_validation(number, 2, value)
    searcher.suggest(STUDY, 4)
    before = searcher.state_dict()["rounds"][0]
    assert searcher.on_validation(4, 3, 0.1)
    assert searcher.state_dict()["rounds"][0] == before
    assert searcher.on_validation(4, 4, 0.1)
    assert searcher.state_dict()["rounds"][1] == [[0.1, 4]]


def test_all_trials_end_at_the_last_interval_without_successors() -> None:
    searcher = population()
    assert not any(searcher.on_validation(number, 10, 0.5 - number) for number in range(4))
    assert searcher.is_over()


def test_numbers_are_multiplied_by_a_factor() -> None:
    searcher = population(2, truncate_fraction=0.5, resample_probability=0, perturb_factors=[1.5])
    best = searcher.suggest(STUDY, 0)
    searcher.on_validation(0, 2, 0.1)
    searcher.on_validation(1, 2, 0.9)
    copy = searcher.suggest(STUDY, 2)
    assert best is not None
    assert copy is not None
    assert copy.params["lr"] == pytest.approx(min(best.params["lr"] * 1.5, 0.1))
    assert copy.params["depth"] == min(round(best.params["depth"] * 1.5), 8)
    assert copy.params["act"] == best.params["act"]


def test_with_resample_probability_one_all_values_are_redrawn() -> None:
    searcher = population(2, truncate_fraction=0.5, resample_probability=1, perturb_factors=[1])
    searcher.on_validation(0, 2, 0.1)
    searcher.on_validation(1, 2, 0.9)
    best, copy = searcher.suggest(STUDY, 0), searcher.suggest(STUDY, 2)
    assert best is not None
    assert copy is not None
    assert copy.params["lr"] != best.params["lr"]


def test_with_truncation_zero_no_trial_ends() -> None:
    searcher = population(truncate_fraction=0)
    assert all(searcher.on_validation(number, 2, number) for number in range(4))


def test_a_failed_trial_is_replaced_by_a_copy_of_a_better_one() -> None:
    searcher = population()
    searcher.on_validation(0, 2, 0.2)
    searcher.on_validation(1, 2, 0.1)
    searcher.on_exit(0, "ERROR")
    successor = searcher.suggest(STUDY, 4)
    assert successor is not None
    assert successor.source == 1


def test_a_trial_that_fails_before_any_interval_is_not_replaced() -> None:
    searcher = population()
    searcher.on_exit(0, "ERROR")
    assert searcher.suggest(STUDY, 4) is None


def test_an_invalid_copy_is_replaced_by_another_copy() -> None:
    searcher = population(2, truncate_fraction=0.5)
    searcher.on_validation(0, 2, 0.1)
    searcher.on_validation(1, 2, 0.9)
    first = searcher.suggest(STUDY, 2)
    searcher.on_exit(2, "INVALID_HP")
    second = searcher.suggest(STUDY, 3)
    assert first is not None
    assert second is not None
    assert (second.source, second.params == first.params) == (0, False)


def test_no_more_trials_are_created_than_allowed() -> None:
    searcher = population(2, truncate_fraction=0.5, max_trials=2)
    searcher.on_validation(0, 2, 0.1)
    searcher.on_validation(1, 2, 0.9)
    assert searcher.suggest(STUDY, 2) is None
    assert searcher.is_over()


def test_a_short_time_gives_fewer_rounds() -> None:
    searcher = population(max_time=2, num_rounds=5)
    assert searcher.on_validation(0, 1, 0.5)
    assert not searcher.on_validation(0, 2, 0.5)


def test_decisions_are_equal_after_loading_a_state() -> None:
    def play(searcher: PopulationBasedTraining, times: range, created: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        for time in times:
            found += [searcher.on_validation(number, time, (number * 7 + time * 3) % 5) for number in range(created)]
            while (suggestion := searcher.suggest(STUDY, created)) is not None:
                found.append(suggestion)
                created += 1
        return found, created

    straight, first, second = population(), population(), population()
    expected, _ = play(straight, range(1, 11), 4)
    before, created = play(first, range(1, 6), 4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after, _ = play(second, range(6, 11), created)
    assert before + after == expected
    assert second.state_dict() == straight.state_dict()


def test_a_fraction_of_less_than_one_trial_warns() -> None:
    sentence = (
        r"pbt: a truncate_fraction of 0\.2 of 4 trials is less than one trial, so that none is replaced by a copy of a "
        r"better one: expected at least 0\.25"
    )
    with pytest.warns(UserWarning, match=sentence):
        PopulationBasedTraining(SPACE, 0, max_time=10, population_size=4)


@pytest.mark.parametrize(("size", "fraction"), [(5, 0.2), (16, 0.2), (2, 0.5), (3, 1 / 3), (4, 0.0)])
def test_a_fraction_of_one_trial_or_zero_does_not_warn(size: int, fraction: float) -> None:
    population(size, truncate_fraction=fraction)
