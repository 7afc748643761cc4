"""The contract of searchers holds for ours and for one that a user wrote, and it bites."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from dovetail.search.contract import SearcherContract
from dovetail.search.searchers import Searcher, SearcherKind, Suggestion, make_searcher, read_searcher, searchers
from dovetail.search.space import Space

TIME = {"max_time": 16, "time_metric": "epochs"}
POPULATION = {"population_size": 4, "truncate_fraction": 0.25, "num_rounds": 4}
OURS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single": ({}, {"max_trials": 1, "replaces_invalid": False}),
    "grid": ({}, {"max_trials": 12, "replaces_invalid": False, "is_random": False}),
    "random": ({"max_trials": 6}, {}),
    "tpe": ({"max_trials": 8, "num_startup_trials": 4}, {}),
    # Optuna's Gaussian process brings torch and scipy: seconds, where the others take none.
    "gp": ({"max_trials": 4, "num_startup_trials": 2}, {"pytestmark": pytest.mark.slow}),
    "cmaes": ({"max_trials": 8, "population_size": 4}, {}),
    "async_halving": ({"max_trials": 8, "num_rungs": 3, **TIME}, {}),
    "adaptive_asha": ({"max_trials": 8, **TIME}, {}),
    "hyperband": ({"max_trials": 9, **TIME}, {}),
    "pbt": ({**POPULATION, **TIME}, {"max_trials": 16}),
}


_MODULE = "dovetail.search.searchers.registry"


def contract_of(name: str, options: dict[str, Any], settings: dict[str, Any]) -> type[SearcherContract]:
    """Return the tests of a searcher by its name."""

    def make(self: SearcherContract, space: Space, seed: int) -> Searcher:
        return make_searcher(read_searcher({"name": name, "metric": "loss", **options}), space, seed)

    bounds = {"max_trials": options["max_trials"]} if "max_trials" in options else {}
    members = {"make": make, **bounds, **settings, "__module__": __name__}
    return type(f"Test_{name}", (SearcherContract,), members)


for _name, _given in OURS.items():
    globals()[f"Test_{_name}"] = contract_of(_name, *_given)


def test_every_built_in_searcher_fulfils_the_contract() -> None:
    assert OURS.keys() == {name for name in searchers.names() if searchers.get(name).make.__module__ == _MODULE}


# ------------------------------------------------------------------ one of a user


class Narrowing(Searcher):
    """Looks closer and closer around the best trial so far, one after another."""

    def __init__(self, space: Space, seed: int, max_trials: int) -> None:
        self._space, self._seed, self._max_trials = space, seed, max_trials
        self._num_ended = self._num_invalid = 0

    def suggest(self, study: Any, number: int) -> Suggestion | None:
        if number > self._num_ended or number >= self._max_trials + self._num_invalid:
            return None
        chance = random.Random(f"{self._seed}/{number}")
        measured = [trial for trial in study.get_trials(deepcopy=False) if trial.value is not None]
        drawn = self._space.sample(chance)
        if not measured:
            return Suggestion(drawn)
        best = min(measured, key=lambda trial: trial.value).params
        places = {
            name: parameter.place(best[name]) * (1 - 1 / number) + parameter.place(drawn[name]) / number
            for name, parameter in self._space.parameters.items()
        }
        return Suggestion({name: self._space.parameters[name].at(place) for name, place in places.items()})

    def on_exit(self, number: int, state: str) -> None:
        self._num_ended += 1
        self._num_invalid += state == "INVALID_HP" and self._num_invalid < self._max_trials

    def is_over(self) -> bool:
        return self._num_ended >= self._max_trials + self._num_invalid

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self._num_ended, "invalid": self._num_invalid}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_ended, self._num_invalid = state["ended"], state["invalid"]


class TestNarrowing(SearcherContract):
    max_trials: ClassVar[int] = 5

    def make(self, space: Space, seed: int) -> Searcher:
        if "narrowing" not in searchers.names():
            searchers.register("narrowing", SearcherKind(lambda config, space, seed: Narrowing(space, seed, 5)))
        return make_searcher(read_searcher({"name": "narrowing", "metric": "loss"}), space, seed)


# ------------------------------------------------------------------ the contract bites


class Fixed(Narrowing):
    """Four trials, which the classes below spoil."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed, 4)


class Restless(Fixed):
    """Draws from the randomness of the process."""

    def suggest(self, study: Any, number: int) -> Suggestion | None:
        found = super().suggest(study, number)
        return None if found is None else Suggestion(self._space.sample(random.Random()))


class Forgetful(Fixed):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_ended = 0


class Outside(Fixed):
    def suggest(self, study: Any, number: int) -> Suggestion | None:
        found = super().suggest(study, number)
        return None if found is None else Suggestion({**found.params, "dropout": 0.75})


class Writing(Fixed):
    def suggest(self, study: Any, number: int) -> Suggestion | None:
        study.ask()
        return super().suggest(study, number)


class Watching(Fixed):
    """Reads trials that still run."""

    def suggest(self, study: Any, number: int) -> Suggestion | None:
        found = super().suggest(study, number)
        return found and Suggestion(self._space.sample(random.Random(len(study.trials))))


class Stuck(Fixed):
    def is_over(self) -> bool:
        return False


class Endless(Fixed):
    def suggest(self, study: Any, number: int) -> Suggestion | None:
        return Suggestion(self._space.sample(random.Random(number)))


class Greedy(Fixed):
    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self._max_trials = 5


class Unwritable(Fixed):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": {1, 2}}


class Shared(Fixed):
    """Returns an object that it changes later."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self._state = {"ended": 0, "invalid": 0}

    def state_dict(self) -> dict[str, Any]:
        self._state |= super().state_dict()
        return self._state


class Unreplaced(Fixed):
    def on_exit(self, number: int, state: str) -> None:
        super().on_exit(number, "COMPLETED")

    def suggest(self, study: Any, number: int) -> Suggestion | None:
        return Suggestion(self._space.sample(random.Random(number))) if number < 4 else None


class Counting(Fixed):
    """Answers otherwise when it is asked again."""

    asked = 0

    def suggest(self, study: Any, number: int) -> Suggestion | None:
        self.asked += 1
        found = super().suggest(study, number)
        return found and Suggestion(found.params, attributes={"asked": self.asked})


class Hashing(Fixed):
    """Draws from what is another number in every process."""

    def suggest(self, study: Any, number: int) -> Suggestion | None:
        found = super().suggest(study, number)
        return found and Suggestion(self._space.sample(random.Random(hash(f"{self._seed}/{number}"))))


class Picky(Fixed):
    def on_validation(self, number: int, time: int, value: float) -> bool:
        assert abs(value) < 1e9, "this is no loss"
        return True


class Idle(Fixed):
    max_concurrent_trials = 0


class Seedless(Fixed):
    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, 0)


class Patient(Fixed):
    """Replaces whatever is invalid."""

    def on_exit(self, number: int, state: str) -> None:
        self._num_ended += 1
        self._num_invalid += state == "INVALID_HP"


class Waiting(Fixed):
    """Continues only after a success."""

    def on_exit(self, number: int, state: str) -> None:
        if state != "ERROR":
            super().on_exit(number, state)


class BrokenContract(SearcherContract):
    max_trials: ClassVar[int] = 4
    kind: ClassVar[type[Fixed]] = Fixed

    def make(self, space: Space, seed: int) -> Searcher:
        return self.kind(space, seed)


BrokenContract.__test__ = False
BROKEN: list[tuple[type[Fixed], str, str]] = [
    (Idle, "test_is_a_searcher", "max_concurrent_trials is 0: no trial runs"),
    (Seedless, "test_another_seed_gives_other_trials", "another seed gives the same trials"),
    (Patient, "test_a_space_that_is_invalid_everywhere_ends", "and the search does not end"),
    (Waiting, "test_trials_that_fail_do_no_harm", r"is_over\(\) is False"),
    (Restless, "test_the_same_seed_gives_the_same_trials", "a second run with the same seed"),
    (Forgetful, "test_its_state_is_all_that_it_remembers", "the state after a round trip"),
    (Outside, "test_suggestions_lie_in_the_space", "dropout is 0.75, which is not in"),
    (Writing, "test_the_study_is_only_read", "the trials of the study"),
    (Watching, "test_trials_that_still_run_change_nothing", "a suggestion beside trials that still run"),
    (Stuck, "test_ends_and_says_so", r"none is suggested, and is_over\(\) is False"),
    (Endless, "test_ends_and_says_so", "and the search does not end"),
    (Greedy, "test_ends_and_says_so", "5 trials were suggested, and max_trials is 4"),
    (Unwritable, "test_its_state_is_all_that_it_remembers", "is not JSON"),
    (Shared, "test_a_state_is_a_snapshot", "a stored state"),
    (Unreplaced, "test_an_invalid_trial_is_replaced", "no other is suggested|is to be replaced"),
    (Counting, "test_asking_again_changes_nothing", "trial 0, requested again"),
    (Hashing, "test_a_fresh_process_suggests_the_same", "in a fresh process"),
    (Picky, "test_a_metric_that_is_not_a_number_does_no_harm", "this is no loss"),
]
for _kind, _, _ in BROKEN:
    _members = {"kind": _kind, "__test__": False, "__module__": __name__}
    globals()[f"{_kind.__name__}Contract"] = type(f"{_kind.__name__}Contract", (BrokenContract,), _members)


@pytest.mark.parametrize(("kind", "test", "sentence"), BROKEN, ids=[kind.__name__ for kind, _, _ in BROKEN])
def test_a_searcher_that_breaks_a_rule_fails_its_contract_test(kind: type[Fixed], test: str, sentence: str) -> None:
    contract = globals()[f"{kind.__name__}Contract"]()
    with pytest.raises(AssertionError, match=sentence):
        getattr(contract, test)()


def test_every_contract_test_fails_for_some_broken_searcher() -> None:
    assert {name for name in dir(SearcherContract) if name.startswith("test_")} == {test for _, test, _ in BROKEN}


def test_a_contract_subclass_without_a_factory_is_not_collected() -> None:
    class Base(SearcherContract):
        max_trials = 3

    assert not Base.__test__
    assert not SearcherContract.__test__
