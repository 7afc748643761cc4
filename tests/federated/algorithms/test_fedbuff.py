"""Updates that are buffered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.algorithms import FedBuff, algorithms
from dovetail.errors import ConfigError
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.messages import Update
from dovetail.testing import AlgorithmContract

_UPDATES = [Update(k, 1, n, delta={"w": torch.tensor(v)}) for k, n, v in [(1, 1, 2.0), (2, 99, 4.0)]]


def test_fedbuff_weights_all_updates_equally() -> None:
    assert FedBuff().aggregate({"w": torch.tensor(1.0)}, _UPDATES, weighted_mean)["w"].item() == 4.0


def test_fedbuff_has_a_server_learning_rate() -> None:
    assert FedBuff(0.5).aggregate({"w": torch.tensor(1.0)}, _UPDATES, weighted_mean)["w"].item() == 2.5


def test_stale_updates_are_scaled_if_configured() -> None:
    updates = [_UPDATES[0], replace(_UPDATES[1], staleness=3)]
    weights = {"w": torch.tensor(0.0)}
    assert FedBuff().aggregate(weights, updates, weighted_mean)["w"].item() == 3.0
    scaled = FedBuff(scale_stale_updates=True).aggregate(weights, updates, weighted_mean)
    assert scaled["w"].item() == pytest.approx((2 + 4 / 2) / 2)


def test_the_server_rate_must_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="server_learning_rate: expected a number above 0, got 0"):
        FedBuff(0)


def test_fedbuff_is_registered_by_name() -> None:
    assert algorithms.get("fedbuff") is FedBuff


class TestFedBuff(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedBuff:
        return FedBuff()
