"""Robust averages: known answers, and what attackers can do to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.averaging import Average, weighted_mean
from dovetail.federated.messages import Update
from dovetail.federated.robust import (
    CoordinateMedian,
    GeometricMedian,
    Krum,
    NormBound,
    TrimmedMean,
    aggregators,
    make_aggregator,
)

ALL: list[Average] = [
    CoordinateMedian(),
    TrimmedMean(0.25),
    Krum(0),
    Krum(0, num_chosen=None),
    GeometricMedian(),
    NormBound(),
]
# Each with the number of attackers among 11 that it promises to stand.
PROMISES: list[tuple[Average, int]] = [
    (CoordinateMedian(), 5),
    (TrimmedMean(0.3), 3),
    (TrimmedMean(0.45), 4),
    (Krum(4), 4),
    (Krum(4, num_chosen=None), 4),
]


def updates_of(values: Sequence[Any], num_samples: Sequence[int] | None = None, **kind: Any) -> list[Update]:
    counts = num_samples or [1] * len(values)
    return [
        Update(k + 1, 1, counts[k], delta={"w": torch.tensor(value, dtype=kind.get("dtype", torch.float64))})
        for k, value in enumerate(values)
    ]


def result(average: Average, values: Sequence[Any], **kind: Any) -> Any:
    return average(updates_of(values, **kind))["w"].tolist()


# ------------------------------------------------------------------ known answers


def test_the_median_is_computed_per_element() -> None:
    assert result(CoordinateMedian(), [[1.0, 9.0], [2.0, 7.0], [5.0, 8.0]]) == [2.0, 8.0]
    assert result(CoordinateMedian(), [1.0, 2.0, 4.0, 100.0]) == 3.0


def test_the_trimmed_mean_leaves_out_both_ends() -> None:
    assert result(TrimmedMean(0.2), [0.0, 1.0, 2.0, 6.0, 100.0]) == 3.0
    assert result(TrimmedMean(0.1), [0.0, 1.0, 2.0, 6.0, 100.0]) == 21.8


def test_a_trimmed_share_is_computed_in_decimal() -> None:
    # 0.29 · 100 is 28.999999999999996 in floating point.
    values = [0.0] * 29 + [1.0] * 42 + [1e9] * 29
    assert result(TrimmedMean(0.29), values) == 1.0


def test_a_trimmed_mean_of_share_zero_is_the_mean() -> None:
    assert result(TrimmedMean(0.0), [1.0, 2.0, 6.0]) == 3.0


def test_krum_chooses_the_update_with_the_nearest_neighbours() -> None:
    # Sums of the two smallest squared distances: 1.25, 0.5, 1.25, 86.5, 16200.5.
    assert result(Krum(1), [1.0, 1.5, 2.0, 8.0, 98.0]) == 1.5


def test_multi_krum_averages_the_best_updates() -> None:
    assert result(Krum(1, num_chosen=3), [1.0, 1.5, 2.0, 8.0, 98.0]) == 1.5
    assert result(Krum(1, num_chosen=None), [1.0, 1.5, 2.0, 8.0, 98.0]) == 3.125
    assert result(make_aggregator({"multi_krum": {"num_attackers": 1}}), [1.0, 1.5, 2.0, 8.0, 98.0]) == 3.125


def test_krum_breaks_ties_by_order() -> None:
    assert result(Krum(0), [2.0, 2.0, 3.0, 3.0]) == 2.0


def test_the_geometric_median_of_a_triangle_is_its_fermat_point() -> None:
    root = math.sqrt(3)
    found = result(GeometricMedian(tolerance=1e-9), [[0.0, 0.0], [2.0, 0.0], [1.0, root]])
    assert found == pytest.approx([1.0, root / 3], abs=1e-6)


def test_the_geometric_median_on_a_line_is_the_median() -> None:
    assert result(GeometricMedian(), [0.0, 1.0, 10.0]) == pytest.approx(1.0, abs=1e-5)


def test_the_geometric_median_moves_away_from_an_update_it_starts_at() -> None:
    # The median of every number is (0, 0), an update; the sum of distances is less elsewhere.
    points = [[0.0, 0.0], [-1.0, 5.0], [-2.0, 6.0], [1.0, -0.1], [2.0, -0.2]]

    def total(point: Sequence[float]) -> float:
        return sum(math.dist(point, other) for other in points)

    found = result(GeometricMedian(1000, tolerance=1e-12), points)
    nearby = [(found[0] + dx, found[1] + dy) for dx in (-0.01, 0, 0.01) for dy in (-0.01, 0, 0.01)]
    assert total(found) <= min(total(point) for point in nearby) + 1e-9


def test_norm_bounded_updates_are_weighted_by_samples() -> None:
    values = [[3.0, 4.0], [0.0, 1.0]]
    found = NormBound(max_norm=2.5)(updates_of(values, num_samples=[3, 1]))["w"]
    assert found.tolist() == pytest.approx([4.5 / 4, 7.0 / 4])


def test_a_bound_above_all_norms_gives_the_weighted_mean() -> None:
    updates = updates_of([[1.0, 2.0], [3.0, 5.0]], num_samples=[7, 2])
    assert torch.equal(NormBound(max_norm=1e6)(updates)["w"], weighted_mean(updates)["w"])


def test_the_default_bound_is_the_median_of_the_norms() -> None:
    assert result(NormBound(), [1.0, -2.0, 1e200]) == pytest.approx(1 / 3)


# ------------------------------------------------------------------ attackers


@pytest.mark.parametrize(("average", "num_attackers"), PROMISES, ids=lambda value: repr(value))
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e3, 1e10, 1e30]),
    together=st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_attackers_leave_the_result_among_the_honest_updates(
    average: Average, num_attackers: int, seed: int, size: float, together: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(11 - num_attackers, 5, generator=generator)
    directions = torch.ones(num_attackers, 5) if together else torch.randn(num_attackers, 5, generator=generator)
    everyone = torch.cat([honest, directions * size])[torch.randperm(11, generator=generator)]
    found = average([Update(k, 1, 1, delta={"w": value}) for k, value in enumerate(everyone)])["w"]
    slack = 1e-5
    assert (found >= honest.min(dim=0).values - slack).all()
    assert (found <= honest.max(dim=0).values + slack).all()


@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e3, 1e10, 1e30]), num_attackers=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_the_geometric_median_is_within_the_bound_of_its_theorem(seed: int, size: float, num_attackers: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(11 - num_attackers, 5, generator=generator, dtype=torch.float64)
    attack = torch.ones(num_attackers, 5, dtype=torch.float64) * size
    found = GeometricMedian()([Update(k, 1, 1, delta={"w": value}) for k, value in enumerate([*honest, *attack])])["w"]
    centre = honest.mean(dim=0)
    # Minsker (2015), lemma 2.1: twice the honest over the honest less the attackers.
    factor = 2 * (11 - num_attackers) / (11 - 2 * num_attackers)
    assert float((found - centre).norm()) <= factor * float((honest - centre).norm(dim=1).max())


def test_one_attacker_moves_the_mean_arbitrarily() -> None:
    assert result(weighted_mean, [1.0, 1.0, 1e30]) > 1e29


def test_attackers_beyond_the_breakdown_point_control_the_result() -> None:
    attacked = [1.0] * 5 + [1e30] * 6
    assert result(CoordinateMedian(), attacked) == 1e30
    assert result(GeometricMedian(), attacked) > 1e29
    assert result(TrimmedMean(0.3), [1.0] * 7 + [1e30] * 4) > 1e29


@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e3, 1e30]))
@settings(deadline=None, max_examples=25)
def test_with_a_bound_an_attacker_has_at_most_its_share(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    honest = list(torch.randn(9, 5, generator=generator, dtype=torch.float64))
    attack = torch.randn(5, generator=generator, dtype=torch.float64) * size
    updates = [Update(k, 1, 1, delta={"w": value}) for k, value in enumerate([*honest, attack])]
    without = NormBound(2.0)([*updates[:-1], Update(10, 1, 1, delta={"w": torch.zeros(5, dtype=torch.float64)})])
    assert float((NormBound(2.0)(updates)["w"] - without["w"]).norm()) <= 2.0 / 10 * (1 + 1e-9)


def test_claimed_samples_of_an_attacker_are_ignored() -> None:
    for average in (CoordinateMedian(), TrimmedMean(0.25), Krum(1), GeometricMedian()):
        claimed = updates_of([1.0, 2.0, 3.0, 4.0, 1e9], num_samples=[1, 1, 1, 1, 10**9])
        assert 1.0 <= average(claimed)["w"].item() <= 4.0


# ------------------------------------------------------------------ types and numbers of updates


@pytest.mark.parametrize("average", ALL, ids=repr)
def test_dtypes_are_kept_and_integers_are_rounded(average: Average) -> None:
    updates = [
        Update(
            k,
            1,
            1,
            delta={
                "half": torch.full((2, 2), 0.5, dtype=torch.float16),
                "brain": torch.tensor(0.25, dtype=torch.bfloat16),
                "double": torch.ones(3, dtype=torch.float64),
                "num_batches_tracked": torch.tensor(steps),
            },
        )
        for k, steps in enumerate((10, 11, 11, 12))
    ]
    found = average(updates)
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in updates[0].delta.items()
    }
    assert 10 <= found["num_batches_tracked"].item() <= 12
    assert found["double"].tolist() == pytest.approx([1.0] * 3)


def test_integers_are_rounded_and_not_truncated() -> None:
    found = CoordinateMedian()(updates_of([10, 12, 13, 100], dtype=torch.int64))["w"]
    assert found.item() == 12  # 12.5, to the even one
    assert TrimmedMean(0.0)(updates_of([1, 2, 2], dtype=torch.int64))["w"].item() == 2


@pytest.mark.parametrize("average", [Krum(1), GeometricMedian()], ids=repr)
def test_integers_do_not_count_as_distance(average: Average) -> None:
    updates = [
        Update(k, 1, 1, delta={"w": torch.tensor([value]), "steps": torch.tensor(steps)})
        for k, (value, steps) in enumerate([(1.0, 5), (1.1, 900), (0.9, 20), (1.05, 300), (50.0, 20)])
    ]
    assert 0.9 <= average(updates)["w"].item() <= 1.1


@pytest.mark.parametrize("average", [each for each in ALL if not isinstance(each, Krum)], ids=repr)
def test_one_update_is_its_own_average(average: Average) -> None:
    assert result(average, [[1.5, -2.0]]) == pytest.approx([1.5, -2.0])


@pytest.mark.parametrize("average", ALL, ids=repr)
def test_equal_updates_are_their_average(average: Average) -> None:
    assert result(average, [[1.5, -2.0]] * 5) == pytest.approx([1.5, -2.0])


@pytest.mark.parametrize("average", ALL, ids=repr)
def test_without_updates_a_robust_mean_is_empty(average: Average) -> None:
    assert average([]) == {}


@pytest.mark.parametrize("total", [1, 4, 6])
def test_krum_rejects_too_few_updates(total: int) -> None:
    with pytest.raises(ConfigError, match=f"Krum with num_attackers=2 needs 7 updates, got {total}"):
        result(Krum(2), [1.0] * total)
    assert result(Krum(2), [1.0] * 7) == 1.0


# ------------------------------------------------------------------ by name


def test_every_aggregator_is_registered_by_name() -> None:
    assert aggregators.names() == [
        "geometric_median",
        "krum",
        "mean",
        "median",
        "multi_krum",
        "norm_bound",
        "trimmed_mean",
    ]
    assert all(callable(make_aggregator(name)) for name in aggregators.names())
    assert make_aggregator("mean") is weighted_mean
    assert make_aggregator({"trimmed_mean": {"share": 0.2}}) == TrimmedMean(0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_aggregator("medain"), "unknown aggregator 'medain': did you mean 'median'?"),
        (lambda: make_aggregator({"krum": {"attackers": 1}}), "unknown argument of aggregator 'krum' 'attackers'"),
        (lambda: TrimmedMean(0.5), "share: expected a number from 0 and below 0.5, got 0.5"),
        (lambda: Krum(-1), "num_attackers: expected a number that is not negative, got -1"),
        (lambda: Krum(1, 0), "num_chosen: expected a number of at least 1, or None, got 0"),
        (lambda: NormBound(0.0), "max_norm: expected a number above 0, or None, got 0.0"),
    ],
)
def test_invalid_aggregator_arguments_raise_one_sentence_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError)) as caught:
        make()
    assert str(caught.value).startswith(message)
