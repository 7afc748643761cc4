from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.search.charts import BarChart, Dimension, Line, LineChart, ParallelChart, Scale

_NUMBERS = st.lists(st.floats(-1e300, 1e300).filter(lambda x: x == 0 or abs(x) > 1e-300), min_size=1, max_size=20)


@given(values=_NUMBERS, is_log=st.sampled_from([None, True, False]))
def test_every_value_has_its_position_on_the_scale_in_order(values: list[float], is_log: bool | None) -> None:
    scale = Scale.of(values, is_log)
    places = [scale(value) for value in sorted(values)]
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    assert places == sorted(places)


@given(values=_NUMBERS)
def test_ticks_are_few_and_on_the_scale(values: list[float]) -> None:
    scale = Scale.of(values)
    ticks = scale.ticks()
    assert len(ticks) <= 10
    assert all(-1e-6 <= scale(tick) <= 1 + 1e-6 for tick in ticks if tick > 0 or not scale.is_log)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 1], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([0, 24], [0, 5, 10, 15, 20]),
        ([-3, 3], [-3, -2, -1, 0, 1, 2, 3]),
        ([0.0002, 0.3], [0.001, 0.01, 0.1]),
        ([0.05, 7], [0.05, 0.1, 0.2, 0.5, 1, 2, 5]),
        ([1e-12, 1], [1e-12, 1e-9, 1e-6, 1e-3, 1]),
        ([5, 5], [3, 4, 5, 6, 7]),
    ],
)
def test_ticks_are_round(values: list[float], ticks: list[float]) -> None:
    assert Scale.of(values).ticks() == pytest.approx(ticks)


@pytest.mark.parametrize(
    "values",
    [
        # A fifth of both is the same number.
        [1.3000000000004435, 1.3000000000004437],
        # Half of it is none.
        [0.0, 5e-324],
        [0.0, 1e-323],
    ],
)
def test_nearly_equal_numbers_have_a_scale(values: list[float]) -> None:
    scale = Scale.of(values)
    assert all(0 <= scale(value) <= 1 for value in values)
    assert all(-1e-6 <= scale(tick) <= 1 + 1e-6 for tick in scale.ticks())


def test_several_magnitudes_use_a_logarithmic_scale_if_all_are_positive() -> None:
    assert Scale.of([1, 100]).is_log
    assert not Scale.of([1, 10]).is_log
    assert not Scale.of([0, 100]).is_log
    assert not Scale.of([1, 100], is_log=False).is_log
    assert Scale.of([1, 10], is_log=True).is_log


def test_a_line_passes_through_its_points_and_a_single_point_is_a_dot() -> None:
    chart = LineChart("x", "y", (Line("a", ((0, 0), (1, 1))), Line("b", ((0.5, 0.5),))))
    assert chart.svg().count("<path") == 2
    assert chart.svg().count("<circle") == 1


def test_a_step_chart_moves_horizontally_before_vertically() -> None:
    chart = LineChart("x", "y", (Line("a", ((0, 0), (1, 1), (2, 1)), style="stairs"),))
    assert chart.svg().count("H") == 4


def test_the_best_trial_is_drawn_last_and_on_top() -> None:
    chart = LineChart("x", "y", (Line("best", ((0, 0), (1, 1)), 1.0), Line("worst", ((0, 1), (1, 0)), 0.0)))
    assert chart.svg().index("<title>worst") < chart.svg().index("<title>best")


def test_long_names_are_escaped_and_shortened_with_the_full_name_as_title() -> None:
    name = "<b>" + "x" * 40
    for chart in (
        BarChart(((name, 1.0),)),
        ParallelChart((Dimension(name, ((0, name),)), Dimension("y", ())), (Line(name, ((0, 0.0), (1, 0.0)), 1.0, 0),)),
    ):
        svg = chart.svg()
        assert "<b>" not in svg
        assert f"<title>&lt;b&gt;{'x' * 40}</title>" in svg


def test_matplotlib_draws_formula_like_names_as_text() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    LineChart("$x^", "y$_$", (Line("a", ((0, 1), (1, math.e))),)).draw(figure)
    figure.canvas.draw()
    assert figure.axes[0].get_xlabel() == r"\$x^"
