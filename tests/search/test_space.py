from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dovetail.checks import ConfigErrors
from dovetail.errors import ConfigError
from dovetail.search.space import Categorical, Double, Integer, Log, Parameter, Space


def grid_of(**leaf: Any) -> list[Any]:
    return [point["x"] for point in Space({"x": leaf}).grid()]


def refusals(hyperparameters: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        Space(hyperparameters)
    return caught.value.problems


@pytest.mark.parametrize(
    ("low", "high", "count", "values"),
    [
        (1, 3, 10, [1, 2, 3]),
        (1, 3, 2, [1, 3]),
        (0, 10, 5, [0, 3, 5, 8, 10]),
        (1, 4, 1, [3]),
        (-4, 4, 3, [-4, 0, 4]),
        (7, 7, 5, [7]),
    ],
)
def test_a_grid_of_integers_is_spaced_evenly_and_rounded(low: int, high: int, count: int, values: list[int]) -> None:
    assert grid_of(type="int", minval=low, maxval=high, count=count) == values


def test_a_grid_of_numbers_is_spaced_evenly() -> None:
    assert grid_of(type="double", minval=0, maxval=1, count=5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_range_with_count_one_gives_its_middle() -> None:
    assert grid_of(type="double", minval=0.5, maxval=1.5, count=1) == [1.0]
    assert grid_of(type="log", base=10, minval=-3, maxval=-1, count=1) == [0.01]


def test_a_logarithmic_grid_is_spaced_by_exponents() -> None:
    assert grid_of(type="log", base=10, minval=-3, maxval=-1, count=3) == [0.001, 0.01, 0.1]
    assert grid_of(type="log", base=2, minval=3, maxval=6, count=4) == [8, 16, 32, 64]
    assert grid_of(type="log", minval=0, maxval=2, count=3) == [1, 10, 100]


def test_a_grid_is_the_product_and_the_last_hyperparameter_changes_fastest() -> None:
    space = Space(
        {
            "size": {"type": "categorical", "vals": [16, 32]},
            "net": {"depth": {"type": "int", "minval": 1, "maxval": 2, "count": 2}, "act": "relu"},
        }
    )
    assert space.grid() == [
        {"size": 16, "net.depth": 1},
        {"size": 16, "net.depth": 2},
        {"size": 32, "net.depth": 1},
        {"size": 32, "net.depth": 2},
    ]


def test_a_grid_of_constants_is_one_point() -> None:
    assert Space({"lr": 0.1}).grid() == [{}]


def test_a_grid_names_every_range_without_a_count() -> None:
    space = Space(
        {
            "lr": {"type": "log", "minval": -3, "maxval": -1},
            "net": {"depth": {"type": "int", "minval": 1, "maxval": 2}},
        }
    )
    with pytest.raises(ConfigErrors) as caught:
        space.grid()
    assert caught.value.problems == [
        "hyperparameters.lr: a grid needs 'count', the number of values to try, with type 'log'",
        "hyperparameters.net.depth: a grid needs 'count', the number of values to try, with type 'int'",
    ]


def test_a_grid_that_is_too_large_is_rejected_before_it_is_built() -> None:
    axis = {"type": "double", "minval": 0, "maxval": 1, "count": 10**6}
    with pytest.raises(ConfigErrors, match=r"at most 100000 points, got 1,000,000,000,000"):
        Space({"x": axis, "y": axis}).grid()


def test_a_trial_gets_constants_and_values_nested_as_in_the_file() -> None:
    space = Space(
        {
            "lr": {"type": "double", "minval": 0, "maxval": 1},
            "net": {"depth": {"type": "int", "minval": 1, "maxval": 9}, "act": {"type": "const", "val": "relu"}},
            "empty": {},
            "nothing": None,
            "constant": {"type": "const", "val": None},
            "sizes": [64, 32],
        }
    )
    assert space.hparams({"lr": 0.5, "net.depth": 3}) == {
        "lr": 0.5,
        "net": {"depth": 3, "act": "relu"},
        "empty": {},
        "nothing": None,
        "constant": None,
        "sizes": [64, 32],
    }


def test_choices_may_be_lists_and_mappings() -> None:
    space = Space({"layers": {"type": "categorical", "vals": [[64], {"wide": [128, 128]}, "none"]}})
    assert [space.hparams(point)["layers"] for point in space.grid()] == [[64], {"wide": [128, 128]}, "none"]
    assert space.distributions()["layers"] == CategoricalDistribution(("[64]", '{"wide": [128, 128]}', "none"))


def test_changes_of_a_trial_do_not_affect_the_space() -> None:
    space = Space({"sizes": [64], "layers": {"type": "categorical", "vals": [[1]]}})
    first = space.hparams({"layers": "[1]"})
    first["sizes"].append(1)
    first["layers"].append(1)
    assert space.hparams({"layers": "[1]"}) == {"sizes": [64], "layers": [1]}


def test_parameters_outside_the_space_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"expected lr, got rate"):
        Space({"lr": {"type": "double", "minval": 0, "maxval": 1}}).hparams({"rate": 1.0})


def test_ranges_are_optuna_distributions() -> None:
    space = Space(
        {
            "lr": {"type": "log", "minval": -4, "maxval": -1},
            "net": {"depth": {"type": "int", "minval": 1, "maxval": 9}},
            "dropout": {"type": "double", "minval": 0, "maxval": 0.5},
            "act": {"type": "categorical", "vals": ["relu", None, True]},
        }
    )
    assert space.distributions() == {
        "lr": FloatDistribution(1e-4, 0.1, log=True),
        "net.depth": IntDistribution(1, 9),
        "dropout": FloatDistribution(0, 0.5),
        "act": CategoricalDistribution(("relu", None, True)),
    }


def test_every_value_of_a_small_range_is_drawn_equally_often() -> None:
    space = Space({"n": {"type": "int", "minval": -1, "maxval": 2}, "c": {"type": "categorical", "vals": ["a", "b"]}})
    chance = random.Random(0)
    drawn = [space.sample(chance) for _ in range(4000)]
    assert all(900 < count < 1100 for count in Counter(params["n"] for params in drawn).values())
    assert Counter(params["n"] for params in drawn).keys() == {-1, 0, 1, 2}
    assert 1900 < Counter(params["c"] for params in drawn)["a"] < 2100


def test_exponents_are_drawn_uniformly() -> None:
    space = Space({"lr": {"type": "log", "minval": -4, "maxval": 0}})
    chance = random.Random(0)
    exponents = [math.log10(space.sample(chance)["lr"]) for _ in range(4000)]
    assert all(900 < sum(low <= exponent < low + 1 for exponent in exponents) < 1100 for low in (-4, -3, -2, -1))


PARAMETERS: list[Parameter] = [
    Integer(("x",), None, -3, 12),
    Integer(("x",), None, 5, 5),
    Double(("x",), None, -1.5, 0.1),
    Log(("x",), None, 10.0, -5.0, 0.3),
    Categorical(("x",), 3, {"a": "a", 1: 1, None: None}),
]


@given(st.sampled_from(PARAMETERS), st.floats(0, 1))
def test_a_value_has_its_relative_position_in_the_range(parameter: Parameter, place: float) -> None:
    value = parameter.at(place)
    again = parameter.at(parameter.place(value))
    assert again == (pytest.approx(value) if isinstance(value, float) else value)


@given(st.sampled_from(PARAMETERS), st.floats(0, 1), st.sampled_from([0.0, 0.8, 1.0, 1.2, 50.0]))
def test_a_scaled_value_is_inside_the_range(parameter: Parameter, place: float, factor: float) -> None:
    value = parameter.scaled(parameter.at(place), factor)
    assert parameter.distribution()._contains(parameter.distribution().to_internal_repr(value))


def test_scaling_a_small_integer_changes_it() -> None:
    depth = Integer(("depth",), None, 1, 9)
    assert (depth.scaled(2, 1.2), depth.scaled(2, 0.8), depth.scaled(1, 0.8), depth.scaled(2, 1.0)) == (3, 1, 1, 2)


@pytest.mark.parametrize(
    ("leaf", "sentence"),
    [
        (
            {"type": "it"},
            "x.type: expected one of const, int, double, log, categorical (did you mean 'int'?), got 'it'",
        ),
        ({"type": 3}, "x.type: expected one of const, int, double, log, categorical, got 3"),
        ({"type": "const", "vla": 1}, "x.vla: unknown key: did you mean 'val'? (known: type, val)"),
        ({"type": "int", "minval": 1, "maxval": 0}, "x.maxval: expected at least minval, 1, got 0"),
        ({"type": "int", "minval": 1.5, "maxval": 3}, "x.minval: expected a whole number, got 1.5"),
        ({"type": "int", "minval": 1, "maxval": 10**20}, "x.maxval: expected a whole number that a float can hold"),
        ({"type": "double", "minval": 1}, "x.maxval: missing"),
        ({"type": "double", "minval": "a", "maxval": 1}, "x.minval: expected a number, got 'a'"),
        ({"type": "double", "minval": 0, "maxval": math.inf}, "x.maxval: expected a number, got inf"),
        ({"type": "double", "minval": -1e308, "maxval": 1e308}, "x.maxval: expected a range whose size fits a float"),
        (
            {"type": "double", "minval": 0, "maxval": 1, "count": 0},
            "x.count: expected a whole number of at least 1, got 0",
        ),
        ({"type": "log", "minval": 0, "maxval": 400}, "x.maxval: expected an exponent of 10 whose power fits a float"),
        ({"type": "log", "minval": -400, "maxval": 0}, "x.minval: expected an exponent of 10 whose power fits a float"),
        ({"type": "log", "base": 1, "minval": 0, "maxval": 1}, "x.base: expected a number above 1, got 1"),
        ({"type": "categorical", "vals": []}, "x.vals: expected a list of values, got []"),
        ({"type": "categorical", "vals": [1, True]}, "x.vals: expected every value once, got [1, True]"),
        ({"type": "categorical", "vals": [math.nan]}, "x.vals: expected values other than NaN, got [nan]"),
        ({"tpye": "int", "minval": 1, "maxval": 2}, "x.tpye: unknown key: did you mean 'type'?"),
        ({"minval": 1, "maxval": 2}, "x.type: missing: one of const, int, double, log, categorical"),
    ],
)
def test_an_invalid_range_raises_a_one_sentence_error(leaf: dict[str, Any], sentence: str) -> None:
    assert any(problem.startswith(f"hyperparameters.{sentence}") for problem in refusals({"x": leaf}))


def test_all_mistakes_of_a_space_are_reported_at_once() -> None:
    assert len(refusals({"a": {"type": "x"}, "b": {"c": {"type": "int"}}})) == 3


def test_two_names_that_a_study_cannot_distinguish_are_rejected() -> None:
    leaf = {"type": "int", "minval": 1, "maxval": 2}
    assert refusals({"a": {"b": leaf}, "a.b": leaf}) == ["hyperparameters.a.b: the name 'a.b' occurs twice"]


def test_a_mapping_may_have_a_value_named_val() -> None:
    assert Space({"split": {"train": 0.8, "val": 0.2}}).hparams({}) == {"split": {"train": 0.8, "val": 0.2}}
