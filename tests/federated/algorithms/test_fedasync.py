"""Updates that are mixed in as they come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.algorithms import FedAsync, algorithms
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.messages import Update
from dovetail.testing import AlgorithmContract

_NOW = {"w": torch.tensor(2.0), "n": torch.tensor(10)}


def _update(**changes: Any) -> Update:
    sent = {"w": torch.tensor(0.0), "n": torch.tensor(4)}
    return replace(Update(1, 1, 10, delta={"w": torch.tensor(4.0), "n": torch.tensor(2)}, sent=sent), **changes)


def test_fedasync_mixes_a_share_of_the_trained_model() -> None:
    mixed = FedAsync(0.25).aggregate(_NOW, [_update()], weighted_mean)
    # 0.75 · 2 + 0.25 · (0 + 4), and 0.75 · 10 + 0.25 · (4 + 2).
    assert mixed["w"].item() == pytest.approx(2.5)
    assert mixed["n"].item() == 9


def test_every_update_of_a_round_is_used() -> None:
    second = _update(delta={"w": torch.tensor(8.0), "n": torch.tensor(0)}, client_id=2)
    mixed = FedAsync(0.5).aggregate(_NOW, [_update(), second], weighted_mean)
    assert mixed["w"].item() == pytest.approx(0.5 * (0.5 * 2 + 0.5 * 4) + 0.5 * 8)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("constant", [0.8, 0.8, 0.8, 0.8]),
        ({"type": "polynomial", "a": 1}, [0.8, 0.4, 0.8 / 3, 0.8 / 6]),
        # Up to b, and beyond it 1 / (a (s - b) + 1).
        ({"type": "hinge", "a": 2, "b": 1}, [0.8, 0.8, 0.8 / 3, 0.8 / 9]),
    ],
)
def test_stale_updates_have_a_smaller_weight(function: Any, expected: list[float]) -> None:
    algorithm = FedAsync(0.8, adaptive_mixing=True, staleness_weighting_function=function)
    assert [algorithm.mixing(staleness) for staleness in (0, 1, 2, 5)] == pytest.approx(expected)
    # The mixed weights do not shrink from round to round.
    assert algorithm.mixing(0) == pytest.approx(0.8)


def test_staleness_counts_only_if_configured() -> None:
    assert FedAsync(0.8).mixing(7) == 0.8
    assert FedAsync(0.8, adaptive_mixing=True).mixing(3) == pytest.approx(0.4)


def test_entries_missing_from_the_update_are_unchanged() -> None:
    weights = {**_NOW, "head": torch.tensor(1.0)}
    assert FedAsync(0.5).aggregate(weights, [_update()], weighted_mean)["head"] is weights["head"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mixing_hyperparameter": 0.0}, "expected a number above 0 and at most 1, got 0.0"),
        ({"staleness_weighting_function": "hinge"}, "only counts with adaptive_mixing=True"),
    ],
)
def test_fedasync_rejects_invalid_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedAsync(**arguments)


def test_an_unknown_staleness_function_raises_an_error() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'polynomial'"):
        FedAsync(adaptive_mixing=True, staleness_weighting_function={"type": "polinomial"})
    with pytest.raises(UnknownNameError, match="unknown argument of staleness weighting 'polynomial' 'b'"):
        FedAsync(adaptive_mixing=True, staleness_weighting_function={"type": "polynomial", "b": 1})


def test_fedasync_is_registered_by_name() -> None:
    assert algorithms.get("fedasync") is FedAsync


class TestFedAsync(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedAsync:
        return FedAsync()
