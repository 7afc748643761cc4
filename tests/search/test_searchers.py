from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import optuna
import pytest

from dovetail.checks import ConfigErrors, Key, whole
from dovetail.errors import ConfigError
from dovetail.search.searchers import (
    Composed,
    NeverStop,
    RandomSampler,
    Sampler,
    Searcher,
    SearcherKind,
    StoppingRule,
    Suggestion,
    make_searcher,
    read_searcher,
    searchers,
)
from dovetail.search.space import Space

HYPERPARAMETERS: dict[str, Any] = {
    "lr": {"type": "log", "minval": -4, "maxval": -1, "count": 3},
    "net": {"depth": {"type": "int", "minval": 1, "maxval": 8, "count": 2}, "width": 64},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.5, "count": 1},
    "act": {"type": "categorical", "vals": ["relu", "tanh"]},
}

OPTIONS: dict[str, dict[str, Any]] = {
    "single": {},
    "grid": {},
    "random": {"max_trials": 8},
    "tpe": {"max_trials": 8, "num_startup_trials": 4},
    "gp": {"max_trials": 8, "num_startup_trials": 4},
    "cmaes": {"max_trials": 8, "population_size": 4},
    "async_halving": {"max_trials": 8, "num_rungs": 3, "max_time": 16, "time_metric": "epochs"},
    "adaptive_asha": {"max_trials": 8, "max_time": 16, "time_metric": "epochs"},
    "hyperband": {"max_trials": 9, "max_time": 9, "time_metric": "epochs"},
    "pbt": {"population_size": 4, "max_time": 10, "time_metric": "epochs", "truncate_fraction": 0.25},
}

# Optuna's Gaussian process brings torch and scipy: seconds, where the others take none.
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "gp" else ()) for name in OPTIONS]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


def make(name: str, seed: int = 0, hyperparameters: dict[str, Any] | None = None, **options: Any) -> Searcher:
    config = read_searcher({"name": name, "metric": "loss", **OPTIONS[name], **options})
    return make_searcher(config, Space(hyperparameters or HYPERPARAMETERS), seed)


def finish(study: optuna.Study, params: dict[str, Any], value: float, space: Space | None = None) -> None:
    distributions = (space or Space(HYPERPARAMETERS)).distributions()
    study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))


def loss(params: dict[str, Any]) -> float:
    return float(abs(math.log10(params["lr"]) + 2.5) + abs(params["net.depth"] - 5) / 4 + params["dropout"])


def run(searcher: Searcher, study: optuna.Study) -> list[Suggestion]:
    """Run trials one after another, to the end of 16 epochs, and return what was suggested."""
    found: list[Suggestion] = []
    while (suggestion := searcher.suggest(study, len(found))) is not None:
        value = loss(suggestion.params)
        goes_on = all(searcher.on_validation(len(found), epoch, value + 1 / epoch) for epoch in range(1, 17))
        searcher.on_exit(len(found), "COMPLETED" if goes_on else "STOPPED")
        finish(study, suggestion.params, value)
        found.append(suggestion)
    return found


def test_a_searcher_method_that_is_never_called_is_named() -> None:
    class Silent(Searcher):
        def suggest(self, study: Any, number: int) -> None:
            return None

        def is_over(self) -> bool:
            return True

        def on_validations(self, number: int, time: int, value: float) -> bool:
            return False

    searchers.register("silent", SearcherKind(lambda config, space, seed: Silent()))
    try:
        with pytest.warns(UserWarning, match="Silent.on_validations is never called: did you mean on_validation"):
            make_searcher(read_searcher({"name": "silent", "metric": "loss"}), Space({}), 0)
    finally:
        del searchers._own["silent"]


class Fixed(Sampler):
    def sample(self, study: Any, number: int) -> dict[str, Any]:
        return {}


class Remembering(Fixed):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Leaving(NeverStop):
    def leaves(self, number: int, state: str) -> None: ...


class Exiting(NeverStop):
    def on_exit(self, number: int, state: str) -> None: ...


class Saving(NeverStop):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Both(Remembering, NeverStop):
    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("sampler", "rule", "sentence"),
    [
        (Remembering(), NeverStop(), "Composed never calls Remembering.state_dict: it calls only sample of a sampler"),
        (Fixed(), Leaving(), "Composed never calls Leaving.leaves: did you mean leave?"),
        (Fixed(), Exiting(), "Composed never calls Exiting.on_exit: did you mean leave?"),
        (Fixed(), Saving(), "Saving defines state_dict without load_state_dict: its state is saved and never restored"),
    ],
)
def test_sampler_and_rule_methods_without_effect_warn(sampler: Sampler, rule: StoppingRule, sentence: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(sentence)) as caught:
        Composed(sampler, rule, max_trials=1)
    assert len(caught) == 1


def test_one_object_may_be_sampler_and_stopping_rule() -> None:
    both = Both()
    assert Composed(both, both, max_trials=1).max_concurrent_trials == 1


@pytest.mark.parametrize("name", ["max_trials", "max_concurrent_trials"])
def test_a_composed_searcher_without_trials_is_an_error(name: str) -> None:
    bounds: dict[str, Any] = {"max_trials": 1, name: 0}
    with pytest.raises(ConfigError, match=f"Composed: {name}: expected a whole number that is at least 1, got 0"):
        Composed(Fixed(), NeverStop(), **bounds)


def test_the_single_searcher_creates_one_trial() -> None:
    assert len(run(make("single"), optuna.create_study())) == 1


def test_the_grid_searcher_creates_every_point_once() -> None:
    found = [suggestion.params for suggestion in run(make("grid"), optuna.create_study())]
    assert found == Space(HYPERPARAMETERS).grid()
    assert len(found) == 3 * 2 * 1 * 2


@pytest.mark.parametrize("name", ["random", "tpe", "cmaes", "async_halving", "adaptive_asha", "hyperband"])
def test_the_number_of_suggested_trials_follows_the_file(name: str) -> None:
    assert len(run(make(name), optuna.create_study())) == OPTIONS[name]["max_trials"]


@pytest.mark.parametrize("name", ["tpe", pytest.param("gp", marks=pytest.mark.slow), "cmaes"])
@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_a_learning_sampler_beats_random_search(name: str, smaller_is_better: bool) -> None:
    axis = {"type": "double", "minval": -1, "maxval": 1}
    sign = 1 if smaller_is_better else -1
    # A Gaussian process takes its time, and needs few trials.
    names, seeds, count = ("xy", 1, 20) if name == "gp" else ("xyz", 3, 40)
    hyperparameters = dict.fromkeys(names, axis)
    space = Space(hyperparameters)

    def mean_of_last(name: str) -> float:
        total = 0.0
        for seed in range(seeds):
            study = optuna.create_study(direction="minimize" if smaller_is_better else "maximize")
            searcher = make(name, seed, hyperparameters, max_trials=count, smaller_is_better=smaller_is_better)
            for number in range(count):
                suggestion = searcher.suggest(study, number)
                assert suggestion is not None
                value = sum((coordinate - 0.4) ** 2 for coordinate in suggestion.params.values())
                finish(study, suggestion.params, sign * value, space)
                total += value if number >= 0.75 * count else 0
        return total / (count / 4 * seeds)

    assert mean_of_last(name) < 0.5 * mean_of_last("random")


@pytest.mark.parametrize("name", ["tpe", "async_halving"])
@pytest.mark.parametrize("has_value", [True, False])
def test_tpe_learns_from_stopped_trials(name: str, has_value: bool) -> None:
    hyperparameters = {"x": {"type": "double", "minval": 0, "maxval": 1}}
    space = Space(hyperparameters)
    options = {"sampler": "tpe"} if name == "async_halving" else {}
    searcher, study = make(name, 0, hyperparameters, max_trials=100, **options), optuna.create_study()
    for number in range(40):
        suggestion = searcher.suggest(study, number)
        assert suggestion is not None
        distance = abs(suggestion.params["x"] - 0.9)
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED,
                params=suggestion.params,
                distributions=space.distributions(),
                value=distance if has_value else None,
                intermediate_values={1: distance},
            )
        )
    assert sum(abs(trial.params["x"] - 0.9) < 0.1 for trial in study.trials[20:]) >= 10


def test_cmaes_draws_categorical_values_at_random() -> None:
    suggestions = run(make("cmaes", max_trials=30), optuna.create_study())
    assert {suggestion.params["act"] for suggestion in suggestions} == {"relu", "tanh"}


def test_cmaes_works_on_one_number() -> None:
    hyperparameters = {"lr": HYPERPARAMETERS["lr"]}
    searcher, study, space = make("cmaes", 0, hyperparameters), optuna.create_study(), Space(hyperparameters)
    for number in range(8):
        suggestion = searcher.suggest(study, number)
        assert suggestion is not None
        finish(study, suggestion.params, suggestion.params["lr"], space)


@pytest.mark.parametrize("name", ["cmaes", "pbt"])
def test_a_population_that_is_too_large_is_rejected(name: str) -> None:
    with pytest.raises(
        ConfigErrors, match=r"population_size: expected a whole number from \d to 10000, got 2147483648"
    ):
        make(name, population_size=2**31)


def test_cmaes_without_a_numeric_hyperparameter_is_rejected() -> None:
    with pytest.raises(ConfigErrors, match=r"searcher\.name: cmaes needs a hyperparameter of type int, double or log"):
        make("cmaes", 0, {"act": HYPERPARAMETERS["act"]})


def test_grid_without_a_count_is_rejected() -> None:
    with pytest.raises(ConfigErrors, match=r"hyperparameters\.lr: a grid needs 'count'"):
        make("grid", 0, {"lr": {"type": "double", "minval": 0, "maxval": 1}})


@pytest.mark.parametrize("name", NAMES)
def test_a_searcher_limits_the_concurrent_trials(name: str) -> None:
    assert make(name).max_concurrent_trials == {"single": 1, "pbt": 4}.get(name, 16)
    if name != "single":
        assert make(name, max_concurrent_trials=3).max_concurrent_trials == 3


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # Two values of lr, three of depth, two of act.
        ("grid", {}, 12),
        ("random", {"max_trials": 40}, 40),
        ("tpe", {"max_trials": 40}, 40),
        ("pbt", {}, 4),
        # As many as one must start for one of them to come to the last rung.
        ("async_halving", {"max_trials": 40, "num_rungs": 3, "max_time": 16}, 16),
        ("async_halving", {"max_trials": 10, "num_rungs": 3, "max_time": 16}, 10),
        ("adaptive_asha", {"max_trials": 64, "max_time": 100}, 15),
    ],
)
def test_without_a_limit_concurrency_equals_determined(name: str, options: dict[str, Any], expected: int) -> None:
    assert make(name, max_concurrent_trials=0, **options).max_concurrent_trials == expected


def test_a_metric_of_nan_is_the_worst() -> None:
    rated = {}
    for values in ([0.5, math.nan], [0.5, math.inf], [0.5, 0.9]):
        searcher = make("async_halving", max_time=4, num_rungs=2)
        rated[values[1]] = [searcher.on_validation(number, 1, value) for number, value in enumerate(values)]
    assert list(rated.values()) == [[True, False]] * 3


def test_a_searcher_can_maximize_the_metric() -> None:
    searcher = make("async_halving", max_time=4, num_rungs=2, smaller_is_better=False)
    assert [searcher.on_validation(number, 1, value) for number, value in enumerate([0.5, 0.4, 0.9])] == [
        True,
        False,
        True,
    ]


def test_a_metric_of_nan_is_the_worst_when_maximizing() -> None:
    searcher = make("async_halving", max_time=4, num_rungs=2, smaller_is_better=False)
    assert [searcher.on_validation(number, 1, value) for number, value in enumerate([0.5, math.nan])] == [True, False]


# Options


def refusals(**section: Any) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        read_searcher(section)
    return caught.value.problems


def test_a_missing_metric_raises_an_explaining_error() -> None:
    assert refusals(name="tpe", max_trials=4) == [
        "searcher.metric: missing: the validation metric that trials are compared by, such as validation_loss"
    ]


@pytest.mark.parametrize("name", ["single", "grid", "random"])
def test_a_searcher_that_compares_no_trials_needs_no_metric(name: str) -> None:
    options = {} if name != "random" else {"max_trials": 2}
    assert read_searcher({"name": name, **options}).metric == ""
    assert refusals(name=name, metric=3, **options) == ["searcher.metric: expected text, got 3"]


def test_an_unknown_searcher_suggests_the_nearest_name() -> None:
    (problem,) = refusals(name="adaptive_ahsa", metric="loss", max_trials=4)
    # Other tests may have registered searchers.
    assert problem.startswith("searcher.name: expected one of adaptive_asha, async_halving, cmaes, ")
    assert problem.endswith("(did you mean 'adaptive_asha'?), got 'adaptive_ahsa'")


@pytest.mark.parametrize("name", ["random", "tpe", "gp", "cmaes", "async_halving", "adaptive_asha", "hyperband"])
def test_the_number_of_trials_is_required(name: str) -> None:
    options = {key: value for key, value in OPTIONS[name].items() if key != "max_trials"}
    assert refusals(name=name, metric="loss", **options) == ["searcher.max_trials: missing: how many trials to run"]


@pytest.mark.parametrize("name", ["async_halving", "adaptive_asha", "hyperband", "pbt"])
def test_the_length_of_trials_is_the_time_of_the_last_rung(name: str) -> None:
    options = {key: value for key, value in OPTIONS[name].items() if key not in ("max_time", "time_metric")}
    config = read_searcher({"name": name, "metric": "loss", "max_length": {"epochs": 20}, **options})
    assert (config.options["max_time"], config.time_metric) == (20, "epochs")


@pytest.mark.parametrize("name", ["async_halving", "adaptive_asha", "hyperband", "pbt"])
def test_a_halving_searcher_requires_a_time(name: str) -> None:
    options = {key: value for key, value in OPTIONS[name].items() if key not in ("max_time", "time_metric")}
    assert [problem.split(":")[0] for problem in refusals(name=name, metric="loss", **options)] == [
        "searcher.time_metric",
        "searcher.max_time",
    ]


def test_a_unit_other_than_the_length_requires_a_time() -> None:
    section = {"name": "hyperband", "metric": "loss", "max_trials": 9, "max_length": {"epochs": 9}}
    assert [problem.split(":")[0] for problem in refusals(**section, time_metric="batches")] == ["searcher.max_time"]
    config = read_searcher({**section, "time_metric": "batches", "max_time": 900})
    assert (config.options["max_time"], config.time_metric) == (900, "batches")


def test_pbt_requires_a_factor() -> None:
    assert refusals(name="pbt", metric="loss", **OPTIONS["pbt"], perturb_factors=[]) == [
        "searcher.perturb_factors: expected a list of at least 1, got []"
    ]


def test_a_searcher_without_early_stopping_needs_no_time() -> None:
    config = read_searcher({"name": "random", "metric": "loss", "max_trials": 9, "max_length": {"records": 9}})
    assert config.time_metric == "batches"


def test_an_option_of_another_searcher_is_rejected() -> None:
    (problem,) = refusals(name="random", metric="loss", max_trials=3, max_rungs=4)
    assert problem.startswith("searcher.max_rungs: unknown key")


def test_users_can_register_a_searcher() -> None:
    def first(config: Any, space: Space, seed: int) -> Searcher:
        return Composed(RandomSampler(space, seed), NeverStop(), max_trials=config.options["tries"])

    try:
        searchers.register("first", SearcherKind(first, {"tries": Key(whole(1), 2)}))
        config = read_searcher({"name": "first", "metric": "loss", "tries": 5})
        assert len(run(make_searcher(config, Space(HYPERPARAMETERS), 0), optuna.create_study())) == 5
        with pytest.raises(ConfigError, match="tries"):
            read_searcher({"name": "first", "metric": "loss", "tires": 5})
    finally:
        del searchers._own["first"]
