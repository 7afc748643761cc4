"""Contract tests for searchers, which `dovetail.testing` exports, too."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from dovetail.extras import require
from dovetail.search.records import TrialRecord, TrialState, best_step
from dovetail.search.searchers.base import Searcher, Suggestion
from dovetail.search.space import Space
from dovetail.search.store import Store

_SEED = 3
# Prevents an endless test if a searcher never ends.
_ENOUGH = 300


class SearcherContract:
    """Tests of a `Searcher`.

    Subclass it at the top level of a test file, and define `make`. Needs the extra `search`; nothing here imports
    pytest.

    Attributes:
        hyperparameters: The search space, as in a file.
        max_trials: The largest number of suggested trials, without replacements of invalid ones.
        max_time: How often a trial reports before it ends.
        is_random: Whether another seed gives other trials.
        replaces_invalid: Whether a trial with invalid hyperparameters is replaced by another trial.

    Example:
        >>> from dovetail.search.searchers import Composed, NeverStop, RandomSampler
        >>> class TestFew(SearcherContract):
        ...     max_trials = 3
        ...
        ...     def make(self, space, seed):
        ...         return Composed(RandomSampler(space, seed), NeverStop(), max_trials=3)
        >>> TestFew().test_ends_and_says_so()
    """

    __test__: ClassVar[bool] = False
    hyperparameters: ClassVar[Mapping[str, Any]] = {
        "lr": {"type": "log", "minval": -4, "maxval": -1, "count": 3},
        "net": {"depth": {"type": "int", "minval": 1, "maxval": 8, "count": 2}, "width": 64},
        "dropout": {"type": "double", "minval": 0, "maxval": 0.5, "count": 1},
        "act": {"type": "categorical", "vals": ["relu", "tanh"]},
    }
    max_trials: ClassVar[int] = 100
    max_time: ClassVar[int] = 16
    is_random: ClassVar[bool] = True
    replaces_invalid: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            cls.__test__ = cls.make is not SearcherContract.make

    def make(self, space: Space, seed: int) -> Searcher:
        """Return a new searcher with the same settings in every call."""
        raise NotImplementedError(f"{type(self).__name__}.make: return the searcher to test")

    # ------------------------------------------------------------------ tests

    def test_is_a_searcher(self) -> None:
        """`make` returns a new searcher that allows at least one trial to run."""
        one, other = self._searcher(), self._searcher()
        assert isinstance(one, Searcher), f"make() returned {one!r}, which is not a Searcher"
        assert one is not other, "make() returned the same object twice"
        assert one.max_concurrent_trials >= 1, f"max_concurrent_trials is {one.max_concurrent_trials}: no trial runs"

    def test_ends_and_says_so(self) -> None:
        """The search suggests at least one trial, at most `max_trials`, and then ends."""
        run = self._run()
        assert not run.searcher.is_over(), "is_over() is True before there was any trial"
        run.finish()
        count = len(run.suggestions)
        assert 1 <= count <= self.max_trials, f"{count} trials were suggested, and max_trials is {self.max_trials}"
        assert run.searcher.suggest(run.study, count) is None, "a trial is suggested after the end"

    def test_suggestions_lie_in_the_space(self) -> None:
        """A suggestion has all searched hyperparameters, each in its range; its source is an earlier trial."""
        for number, suggestion in enumerate(self._run().finish().suggestions):
            source = suggestion.source
            assert source is None or 0 <= source < number, f"trial {number} starts from a checkpoint of trial {source}"
            _as_json(suggestion.attributes, f"the attributes of trial {number}")

    def test_the_same_seed_gives_the_same_trials(self) -> None:
        """Two runs with the same seed suggest the same trials."""
        _assert_same(self._run().finish(), self._run().finish(), "a second run with the same seed")

    def test_another_seed_gives_other_trials(self) -> None:
        """Another seed gives other trials, if `is_random` is set."""
        if self.is_random:
            one, other = self._run(), self._run(_SEED + 1)
            assert one.finish().suggestions != other.finish().suggestions, "another seed gives the same trials"

    def test_its_state_is_all_that_it_remembers(self) -> None:
        """A new searcher that loads the state, as JSON, after every event makes the same decisions."""

        def replaced(searcher: Searcher) -> Searcher:
            # Through JSON, because the store keeps it as JSON: tuples and keys that are numbers would change there.
            fresh, state = self._searcher(), _as_json(searcher.state_dict(), "the state")
            fresh.load_state_dict(json.loads(state))
            _assert_equal(_as_json(fresh.state_dict(), "the state"), state, "the state after a round trip")
            return fresh

        _assert_same(
            self._run().finish(replaced),
            self._run().finish(),
            "a run that loads its state again and again",
        )

    def test_a_state_is_a_snapshot(self) -> None:
        """A state that `state_dict` returned does not change when the searcher continues."""
        kept: list[tuple[Any, str]] = []

        def noted(searcher: Searcher) -> Searcher:
            state = searcher.state_dict()
            kept.append((state, _as_json(state, "the state")))
            return searcher

        self._run().finish(noted)
        for state, text in kept:
            _assert_equal(_as_json(state, "the state"), text, "a stored state after the searcher continued")

    def test_asking_again_changes_nothing(self) -> None:
        """Requesting the same trial again, as the runner after a killed one does, gives the same result."""
        run = self._run()

        def request_twice(searcher: Searcher) -> Searcher:
            kind, suggestion, *_ = run.events[-1]
            if kind == "suggest":
                number, state = len(run.suggestions) - 1, searcher.state_dict()
                _assert_equal(searcher.suggest(run.study, number), suggestion, f"trial {number}, requested again")
                _assert_equal(searcher.state_dict(), state, f"the state after trial {number} was requested again")
            return searcher

        run.finish(request_twice)

    def test_the_study_is_only_read(self) -> None:
        """A searcher does not write to the study; only the runner does."""
        run = self._run()
        before = run.study.trials
        run.searcher.suggest(run.study, 0)
        _assert_equal(run.study.trials, before, "the trials of the study")
        run.finish()
        _assert_equal(len(run.study.trials), len(run.suggestions), "the number of trials in the study")

    def test_trials_that_still_run_change_nothing(self) -> None:
        """Only finished trials have an influence, so that results do not depend on the timing of running trials."""
        answers, last = [], min(5, self._num_trials()) - 1
        for is_busy in (False, True):
            run = self._run().finish(last=last)
            if is_busy:
                # A running trial without a value in the same study.
                run.study.ask(run.space.distributions())
            answers.append(run.searcher.suggest(run.study, len(run.suggestions)))
        _assert_equal(answers[1], answers[0], "a suggestion beside trials that still run")

    def test_a_fresh_process_suggests_the_same(self) -> None:
        """Another process, with the state and the finished trials, gives the same suggestion."""
        run = self._run().finish(last=self._num_trials() - 1)
        number = len(run.suggestions)
        trials = [
            [trial.state.name, trial.params, trial.value, list(trial.intermediate_values.items())]
            for trial in run.study.trials
        ]
        given = {"trials": trials, "state": run.searcher.state_dict(), "number": number}
        cls = type(self)
        found = subprocess.run(  # noqa: S603 - this program
            [sys.executable, "-c", _FRESH, inspect.getfile(cls), cls.__qualname__],
            input=json.dumps(given),
            # Sets have another order in the new process, too.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "7"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, f"the fresh process failed: {found.stderr}"
        expected = run.searcher.suggest(run.study, number)
        assert expected is not None, f"trial {number} was suggested before"
        _assert_equal(found.stdout.strip(), _as_json(expected.params, "the hyperparameters"), "in a fresh process")

    def test_an_invalid_trial_is_replaced(self) -> None:
        """A trial that is `INVALID_HP` is replaced by another one, if `replaces_invalid` is set."""
        if not self.replaces_invalid:
            count = len(self._run(ends=lambda number: "COMPLETED" if number else "INVALID_HP").finish().suggestions)
            assert count <= self._num_trials(), "a trial is replaced; if this is intended, set replaces_invalid"
            return
        searcher, study = self._searcher(), self._run().study
        asked = 0
        # All trials are suggested first, so that any further suggestion can only be the replacement.
        while asked < _ENOUGH and searcher.suggest(study, asked) is not None:
            asked += 1
        searcher.on_exit(0, "INVALID_HP")
        # The state includes the trials to be replaced.
        loaded = self._searcher()
        loaded.load_state_dict(json.loads(_as_json(searcher.state_dict(), "the state")))
        for each in (searcher, loaded):
            assert not each.is_over(), "is_over() is True although a trial is to be replaced"
            assert each.suggest(study, asked) is not None, f"trial 0 of {asked} was invalid, and no other is suggested"
            assert each.suggest(study, asked + 1) is None, "one trial was invalid, and two others are suggested"

    def test_a_space_that_is_invalid_everywhere_ends(self) -> None:
        """The number of replacements is limited."""
        self._run(ends=_always("INVALID_HP")).finish()

    def test_trials_that_fail_do_no_harm(self) -> None:
        """A search all of whose trials end in `ERROR` or `CANCELED`, or every other one, ends."""
        self._run(ends=_always("ERROR")).finish()
        self._run(ends=_always("CANCELED")).finish()
        mixed = self._run(ends=lambda number: "ERROR" if number % 2 else "COMPLETED").finish()
        assert len(mixed.suggestions) <= self.max_trials, f"{len(mixed.suggestions)} trials were suggested"

    def test_a_metric_that_is_not_a_number_does_no_harm(self) -> None:
        """NaN and infinite losses are accepted, and the state can still be stored as JSON."""
        for value in (math.nan, math.inf, -math.inf):
            run = self._run(spoiled=value).finish()
            _as_json(run.searcher.state_dict(), "the state")
            assert len(run.suggestions) <= self.max_trials, f"{len(run.suggestions)} trials were suggested"

    # ------------------------------------------------------------------ private

    def _searcher(self, seed: int = _SEED) -> Searcher:
        return self.make(Space(self.hyperparameters), seed)

    def _run(
        self, seed: int = _SEED, ends: Callable[[int], TrialState] | None = None, spoiled: float | None = None
    ) -> _Run:
        space = Space(self.hyperparameters)
        return _Run(self._searcher(seed), space, self.max_time, ends or _always("COMPLETED"), spoiled)

    def _num_trials(self) -> int:
        return len(self._run().finish().suggestions)


class _Run:
    """A search whose trials take no time: does what a runner does, one event after another."""

    def __init__(
        self, searcher: Searcher, space: Space, max_time: int, ends: Callable[[int], TrialState], spoiled: float | None
    ) -> None:
        require("optuna", "search")
        from optuna.storages import InMemoryStorage

        self.searcher = searcher
        self.space = space
        self.suggestions: list[Suggestion] = []
        self.events: list[tuple[Any, ...]] = []
        self._max_time, self._ends, self._spoiled = max_time, ends, spoiled
        # The running trials: the number in the store, and the reported values.
        self._running: dict[int, tuple[int, dict[int, float]]] = {}
        self._store = Store(Path(), "memory", InMemoryStorage())
        self._id = self._store.new_study("contract", smaller_is_better=True)
        self.study = self._store.study(self._id)

    def finish(self, after_event: Callable[[Searcher], Searcher] | None = None, last: int = _ENOUGH) -> _Run:
        """Run until the search ends, and return this object.

        Args:
            after_event: Receives the searcher after every event, and returns the one to continue with.
            last: Request at most this number of trials.
        """
        while self._suggest(last) or self._report():
            assert len(self.suggestions) < _ENOUGH, f"{_ENOUGH} trials were suggested, and the search does not end"
            if after_event is not None:
                self.searcher = after_event(self.searcher)
        is_over = len(self.suggestions) == last or self.searcher.is_over()
        assert is_over, "no trial runs, none is suggested, and is_over() is False"
        return self

    def _suggest(self, last: int) -> bool:
        number = len(self.suggestions)
        # At most three at a time, so that a stopping rule compares trials that run side by side.
        if number == last or len(self._running) >= min(self.searcher.max_concurrent_trials, 3):
            return False
        suggestion = self.searcher.suggest(self.study, number)
        if suggestion is None:
            return False
        _assert_inside(self.space, suggestion.params, f"trial {number}")
        self.suggestions.append(suggestion)
        self.events.append(("suggest", suggestion))
        hparams = self.space.hparams(suggestion.params)
        trial_id = self._store.add_trial(self._id, suggestion.params, self.space.distributions(), hparams)
        self._running[number] = trial_id, {}
        return True

    def _report(self) -> bool:
        """Report a value for the trial with the fewest reports."""
        if not self._running:
            return False
        # The trial with the fewest reports is next, so that all trials advance together as on a machine.
        number = min(self._running, key=lambda each: (len(self._running[each][1]), each))
        values, state = self._running[number][1], self._ends(number)
        if state == "COMPLETED":
            time = len(values) + 1
            values[time] = self._value(number, time)
            goes_on = self.searcher.on_validation(number, time, values[time])
            self.events.append(("report", number, time, goes_on))
            if goes_on and time < self._max_time:
                return True
            state = "COMPLETED" if time == self._max_time else "STOPPED"
        self.searcher.on_exit(number, state)
        self.events.append(("exit", number, state))
        self._end(number, state)
        return True

    def _end(self, number: int, state: TrialState) -> None:
        trial_id, values = self._running.pop(number)
        for time, value in values.items():
            self._store.add_value(trial_id, time, value)
        best_at = best_step(values, smaller_is_better=True)
        best = None if best_at is None else values[best_at]
        self._store.end_trial(TrialRecord(trial_id, number, self._id, state, {}, Path(), best=best))

    def _value(self, number: int, time: int) -> float:
        """Return the metric: a quadratic function of the hyperparameters that decreases with time."""
        if self._spoiled is not None and number % 2:
            return self._spoiled
        params = self.suggestions[number].params
        places = [parameter.place(params[name]) for name, parameter in self.space.parameters.items()]
        return sum((place - 0.4) ** 2 for place in places) + 1 / time


def _always(state: TrialState) -> Callable[[int], TrialState]:
    return lambda number: state


_FRESH = """
import sys
from dovetail.search.contract import answer
print(answer(*sys.argv[1:], sys.stdin.read()))
"""


def answer(path: str, name: str, given: str) -> str:
    """Return, as JSON, the suggestion of a contract's searcher in a new process, after some finished trials."""
    from optuna.trial import TrialState as OptunaState
    from optuna.trial import create_trial

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    contract: SearcherContract = getattr(module, name)()
    run, known = contract._run(), json.loads(given)
    for state, params, value, values in known["trials"]:
        run.study.add_trial(
            create_trial(
                state=OptunaState[state],
                value=value,
                params=params,
                distributions=run.space.distributions(),
                intermediate_values=dict(values),
            )
        )
    run.searcher.load_state_dict(known["state"])
    suggestion = run.searcher.suggest(run.study, known["number"])
    return "null" if suggestion is None else _as_json(suggestion.params, "the hyperparameters")


def _as_json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what}: {value!r} is not JSON: {error}") from error


def _assert_inside(space: Space, params: Mapping[str, Any], what: str) -> None:
    distributions = space.distributions()
    assert params.keys() == distributions.keys(), f"{what}: it has {[*params]}, and {[*distributions]} are searched"
    for name, known in distributions.items():
        is_inside = known._contains(known.to_internal_repr(params[name]))
        assert is_inside, f"{what}: {name} is {params[name]!r}, which is not in {known}"


def _assert_same(one: _Run, other: _Run, what: str) -> None:
    for event, expected in zip_longest(one.events, other.events):
        _assert_equal(event, expected, what)


def _assert_equal(one: Any, other: Any, what: str) -> None:
    assert one == other, f"{what}: {one!r} is not {other!r}"
