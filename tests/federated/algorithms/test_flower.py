"""Flower's strategies as a server's aggregation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.algorithms import FedAvg
from dovetail.clients import simple
from dovetail.errors import ConfigError
from dovetail.federated.averaging import moved, weighted_mean
from dovetail.federated.messages import Update
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer

strategies = pytest.importorskip("flwr.serverapp.strategy", reason="the extra `flower` is not installed")
FlowerStrategy = pytest.importorskip("dovetail.federated.algorithms.flower").FlowerStrategy

_WEIGHTS = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor(0.5)}


def _updates(*rows: Any) -> list[Update]:
    return [
        Update(k, 1, n, delta={"w": torch.tensor(w), "b": torch.tensor(b)}) for k, (n, w, b) in enumerate(rows, start=1)
    ]


_THREE = _updates((10, [1.0, 2.0], 0.5), (30, [-1.0, 0.0], 0.25), (60, [0.5, 0.5], -1.0))


def _federation(algorithm: Any, **settings: Any) -> tuple[fedavg.Server, simple.Client]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    settings = {"rounds": 4, "total_clients": 3, "per_round": 3, **settings}
    server = fedavg.Server(model=lambda: model, algorithm=algorithm, **settings)
    return server, simple.Client(trainer=ComposableTrainer(num_epochs=1, batch_size=64, learning_rate=0.05))


def test_flower_fedavg_equals_ours() -> None:
    ours = FedAvg().aggregate(_WEIGHTS, _THREE, weighted_mean)
    theirs = FlowerStrategy(strategies.FedAvg()).aggregate(_WEIGHTS, _THREE, weighted_mean)
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)


def test_a_federation_with_flower_fedavg_equals_one_with_ours() -> None:
    torch.manual_seed(3)
    ours, client = _federation(FedAvg())
    torch.manual_seed(3)
    theirs, _ = _federation(FlowerStrategy(strategies.FedAvg()))
    ours.run(client)
    theirs.run(client)
    torch.testing.assert_close(theirs.weights, ours.weights, rtol=1e-5, atol=1e-6)


def test_one_step_of_flower_fedadam_follows_the_formula() -> None:
    eta, beta_1, beta_2, tau = 0.1, 0.9, 0.99, 1e-3
    strategy = strategies.FedAdam(eta=eta, beta_1=beta_1, beta_2=beta_2, tau=tau)
    made = FlowerStrategy(strategy).aggregate(_WEIGHTS, _THREE, weighted_mean)
    mean = weighted_mean(_THREE)
    # Flower corrects the bias of the first round with the powers of the second.
    rate = eta * (1 - beta_2**2) ** 0.5 / (1 - beta_1**2)
    for name, value in _WEIGHTS.items():
        first, second = (1 - beta_1) * mean[name], (1 - beta_2) * mean[name] ** 2
        torch.testing.assert_close(made[name], value + rate * first / (second.sqrt() + tau))


def test_the_flower_median_is_over_the_trained_weights() -> None:
    made = FlowerStrategy(strategies.FedMedian()).aggregate(_WEIGHTS, _THREE, weighted_mean)
    assert made["w"].tolist() == [1.5, -1.5]
    assert made["b"].item() == 0.75


def test_flower_krum_selects_one_of_the_updates() -> None:
    near = _updates((1, [1.0, 1.0], 0.0), (1, [1.0, 1.1], 0.0), (1, [0.9, 1.0], 0.0), (1, [90.0, 9.0], 9.0))
    made = FlowerStrategy(strategies.Krum(num_malicious_nodes=1)).aggregate(_WEIGHTS, near, weighted_mean)
    candidates = [moved(_WEIGHTS, update.delta) for update in near[:3]]
    assert any(all(torch.equal(made[name], each[name]) for name in made) for each in candidates)


@pytest.mark.parametrize(
    "make",
    [
        lambda: strategies.FedAdam(eta=0.01),
        lambda: strategies.FedYogi(eta=0.01),
        lambda: strategies.FedAdagrad(eta=0.01),
        lambda: strategies.FedAvgM(server_momentum=0.9),
    ],
    ids=["adam", "yogi", "adagrad", "momentum"],
)
def test_a_resumed_flower_server_ends_with_the_same_bits(make: Callable[..., Any], tmp_path: Path) -> None:
    def federation(**settings: Any) -> tuple[fedavg.Server, simple.Client]:
        torch.manual_seed(3)
        return _federation(FlowerStrategy(make()), **settings)

    whole, client = federation()
    whole.run(client)
    federation(rounds=2, checkpoint_path=str(tmp_path))[0].run(client)
    resumed, _ = federation(checkpoint_path=str(tmp_path))
    resumed.run(client)
    assert all(torch.equal(value, resumed.weights[name]) for name, value in whole.weights.items())


def test_the_state_of_a_flower_strategy_holds_its_moments() -> None:
    algorithm = FlowerStrategy(strategies.FedAdam(eta=0.01))
    assert algorithm.state_dict() == {"round": 0, "strategy": {}}
    algorithm.aggregate(_WEIGHTS, _THREE, weighted_mean)
    assert algorithm.state_dict()["strategy"].keys() == {"m_t", "v_t"}


def test_averaged_integers_remain_integers() -> None:
    weights = {**_WEIGHTS, "steps": torch.tensor(10)}
    updates = [
        Update(update.client_id, 1, update.num_samples, delta={**update.delta, "steps": torch.tensor(steps)})
        for update, steps in zip(_THREE, (1, 2, 4), strict=True)
    ]
    made = FlowerStrategy(strategies.FedAdam()).aggregate(weights, updates, weighted_mean)
    assert made["steps"].item() == 13
    assert made["steps"].dtype == torch.int64


def test_the_given_flower_strategy_is_not_changed() -> None:
    given = strategies.FedAdam(min_available_nodes=7)
    FlowerStrategy(given).aggregate(_WEIGHTS, _THREE, weighted_mean)
    assert given.m_t is None
    assert given.min_available_nodes == 7


def test_flower_strategies_reject_another_aggregator() -> None:
    def noisy(updates: Any) -> Any:
        return {name: value + 1 for name, value in weighted_mean(updates).items()}

    with pytest.raises(ConfigError, match="FedAdam makes the mean itself: leave out"):
        FlowerStrategy(strategies.FedAdam()).aggregate(_WEIGHTS, _THREE, noisy)


def test_an_object_that_is_not_a_flower_strategy_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"strategy: expected one of flwr\.serverapp\.strategy, got 'FedAdam'"):
        FlowerStrategy("FedAdam")


def test_flower_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("flwr").level
    FlowerStrategy(strategies.FedAvg()).aggregate(_WEIGHTS, _THREE, weighted_mean)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("flwr").level == level
