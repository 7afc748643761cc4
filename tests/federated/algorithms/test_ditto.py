"""Ditto: a model of the client's own, held near the one that it was sent."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, Point, federation, half_square, mlp, toy

from dovetail.algorithms import SCAFFOLD, Algorithm, CompositeAlgorithm, FedAvg, FedProx
from dovetail.errors import ConfigError, FederationError
from dovetail.federated.algorithms.ditto import Ditto, DittoUpdateStrategy, DittoUpdateStrategyFromConfig
from dovetail.testing import AlgorithmContract, ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.reuse import configure
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    SGDOptimizerStrategy,
    ShuffleDataLoaderStrategy,
    StepLRSchedulerStrategy,
)


class TestDitto(AlgorithmContract):
    vectorizes = True

    def make(self) -> Ditto:
        return Ditto(ditto_lambda=0.5, personalization_epochs=2)


@pytest.mark.torture
class TestBesideScaffold(AlgorithmContract):
    vectorizes = True

    def make(self) -> Algorithm:
        return CompositeAlgorithm([SCAFFOLD(), Ditto(personalization_epochs=1)])


class TestStrategy(ModelUpdateStrategyContract):
    def make(self) -> DittoUpdateStrategy:
        return DittoUpdateStrategy(personalization_epochs=2)


@pytest.mark.parametrize("optimizer", [SGDOptimizerStrategy(lr=0.1, momentum=0.5), AdamOptimizerStrategy(lr=0.01)])
def test_a_fleet_ends_where_clients_alone_do(optimizer: Any) -> None:
    def run(backend: str) -> tuple[Any, Any]:
        trainer = ComposableTrainer(
            optimizer_strategy=optimizer,
            data_loader_strategy=ShuffleDataLoaderStrategy(),
            gradient_clip=0.5,
            num_epochs=2,
            batch_size=8,
            verbose=False,
        )
        server = federation(Ditto(personalization_epochs=2), trainer=trainer, backend=backend)
        return server.weights, [server.states.get(client_id) for client_id in range(1, 5)]

    torch.testing.assert_close(run("vectorized"), run("sequential"), rtol=0, atol=1e-10)


def _bowl(strategy: DittoUpdateStrategy, rate: float = 0.1, **options: Any) -> ComposableTrainer:
    """Train f(w) = w² / 2 from 2 on: one step of w, and then the steps of v."""
    trainer = ComposableTrainer(
        Point(2.0),
        loss_strategy=half_square,
        optimizer_strategy=SGDOptimizerStrategy(lr=rate),
        model_update_strategy=strategy,
        num_epochs=1,
        verbose=False,
        **options,
    )
    trainer.fit((torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)))
    return trainer


def _own(trainer: ComposableTrainer) -> float:
    return float(trainer.context.client.state["ditto"]["w"])


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_steps_of_the_personal_model_follow_the_paper() -> None:
    v = 2.0
    for _ in range(3):
        v -= 0.1 * (v + 0.5 * (v - 2.0))
    trainer = _bowl(DittoUpdateStrategy(ditto_lambda=0.5, personalization_epochs=3))
    assert _own(trainer) == pytest.approx(v, abs=1e-15)
    assert trainer.model.w.item() == pytest.approx(1.8, abs=1e-15)


def test_with_lambda_zero_the_personal_model_trains_locally_across_rounds() -> None:
    server = toy(Ditto(ditto_lambda=0.0, personalization_epochs=10), rounds=5)
    for client_id, (a, b) in enumerate([(1.0, -2.0), (3.0, 1.0)], start=1):
        # Fifty steps of 0.05 on a (v - b)² / 2, from 0 on.
        expected = b - b * (1 - 0.05 * a) ** 50
        assert server.states.get(client_id)["ditto"]["w"].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("pull", [10.0, 1e3, 1e6])
def test_a_larger_lambda_keeps_the_personal_model_nearer_to_the_global_one(pull: float) -> None:
    # The minimum of v² / 2 + λ (v - 2)² / 2; the rate is below what the term makes unstable.
    trainer = _bowl(DittoUpdateStrategy(ditto_lambda=pull, personalization_epochs=60), rate=0.5 / (1 + pull))
    assert _own(trainer) == pytest.approx(2 * pull / (1 + pull), abs=1e-12)


def test_the_personal_model_is_pulled_to_the_received_model() -> None:
    trainer = _bowl(DittoUpdateStrategy(ditto_lambda=1e3, personalization_epochs=1), rate=1e-3)
    # The first step is from wᵗ, where the pull is nothing.
    assert _own(trainer) == pytest.approx(2.0 - 1e-3 * 2.0, abs=1e-15)


def test_ditto_sends_the_update_of_fedavg_bit_for_bit() -> None:
    plain, ditto = federation(FedAvg()), federation(Ditto())
    assert _same(ditto.weights, plain.weights)
    assert [record.metrics for record in ditto.records] == [record.metrics for record in plain.records]


def test_the_steps_of_the_personal_model_are_not_counted_as_updates() -> None:
    told: list[int] = []

    class Counting(Ditto):
        def aggregate(self, weights: Any, updates: Any, average: Any) -> dict[str, Tensor]:
            told.extend(update.num_updates for update in updates)
            return super().aggregate(weights, updates, average)

    federation(Counting(), rounds=1)
    # Two epochs of batches of 8, of 25, 7, 40 and 16 samples.
    assert sorted(told) == [2, 4, 8, 10]


@pytest.mark.parametrize("place", [0, 1])
def test_ditto_does_not_change_scaffold(place: int) -> None:
    both = federation(CompositeAlgorithm([SCAFFOLD(), Ditto()] if place == 0 else [Ditto(), SCAFFOLD()]))
    alone = federation(SCAFFOLD())
    assert _same(both.weights, alone.weights)
    assert _same(both.algorithm.state_dict()["parts"][place]["control"], alone.algorithm.state_dict()["control"])
    for client_id in range(1, 5):
        assert _same(both.states.get(client_id)["scaffold"], alone.states.get(client_id)["scaffold"])


def test_the_fedprox_term_does_not_apply_to_the_personal_model() -> None:
    alone = federation(Ditto(ditto_lambda=0.3), rounds=1)
    both = federation(CompositeAlgorithm([FedProx(mu=1.0), Ditto(ditto_lambda=0.3)]), rounds=1)
    assert not _same(both.weights, alone.weights)
    assert _same(both.states.get(1)["ditto"], alone.states.get(1)["ditto"])


def test_two_algorithms_with_phases_are_rejected() -> None:
    expected = (
        "ConfigError: phases: DittoUpdateStrategy() and SCAFFOLDUpdateStrategyV2() both divide a run into phases; use "
        "one of them"
    )
    with pytest.raises(FederationError, match=f"4 failed; .*{re.escape(expected)}$"):
        federation(CompositeAlgorithm([SCAFFOLD(option=1), Ditto()]), rounds=1)


def test_a_client_has_a_personal_model_only_after_its_first_round() -> None:
    server = federation(Ditto(), rounds=1, per_round=2)
    asked = set(server.records[0].reported)
    kept = {client_id: server.states.get(client_id).get("ditto") for client_id in range(1, 5)}
    assert {client_id for client_id, own in kept.items() if own is not None} == asked
    one, other = (kept[client_id] for client_id in asked)
    assert not _same(one, other)


def test_clients_are_evaluated_with_the_personal_model() -> None:
    server = federation(Ditto(ditto_lambda=0.0))
    found = server.evaluate_clients().metrics
    model = mlp()
    for client_id, metrics in found.items():
        model.load_state_dict(server.states.get(client_id)["ditto"])
        x, y = Blobs().test_data(client_id)
        assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), abs=1e-12)


def test_the_personalization_round_trains_only_the_personal_model() -> None:
    server = toy(Ditto(ditto_lambda=0.0, personalization_epochs=2), rounds=1)
    server.personalize(epochs=3)
    for client_id, (a, b) in enumerate([(1.0, -2.0), (3.0, 1.0)], start=1):
        expected = b - b * (1 - 0.05 * a) ** 5
        assert server.states.get(client_id)["ditto"]["w"].item() == pytest.approx(expected, abs=1e-12)


def test_model_fn_builds_the_first_personal_model_without_changing_the_rng() -> None:
    def trained(strategy: DittoUpdateStrategy) -> ComposableTrainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
        trainer = ComposableTrainer(model, model_update_strategy=strategy, num_epochs=2, seed=1, verbose=False)
        trainer.fit(Blobs().train_data(1))
        return trainer

    def zeros() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
        for parameter in made.parameters():
            nn.init.zeros_(parameter)
        return made

    plain = trained(DittoUpdateStrategy(personalization_epochs=0))
    other = trained(DittoUpdateStrategy(personalization_epochs=0, model_fn=zeros))
    assert _same(other.model.state_dict(), plain.model.state_dict())
    assert not any(value.any() for value in other.context.client.state["ditto"].values())


def test_a_model_fn_of_another_architecture_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"model_fn: expected a model with w \(\), got one with weight \(1, 1\)"):
        _bowl(DittoUpdateStrategy(model_fn=lambda: nn.Linear(1, 1, bias=False)))


def test_the_schedule_restarts_for_the_personal_model() -> None:
    # Rates of 0.1 and 0.05 for w, and the same for v.
    data = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    trainer = ComposableTrainer(
        Point(2.0),
        loss_strategy=half_square,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
        lr_scheduler_strategy=StepLRSchedulerStrategy(step_size=1, gamma=0.5),
        model_update_strategy=DittoUpdateStrategy(ditto_lambda=0.0, personalization_epochs=2),
        num_epochs=2,
        verbose=False,
    )
    trainer.fit(data)
    assert trainer.model.w.item() == _own(trainer) == pytest.approx(2 * 0.9 * 0.95, abs=1e-15)


def test_each_of_the_two_models_has_its_batch_statistics() -> None:
    def trained(strategy: Any) -> ComposableTrainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        trainer = ComposableTrainer(model, model_update_strategy=strategy, num_epochs=2, batch_size=25, verbose=False)
        trainer.fit(Blobs().train_data(1))
        return trainer

    plain, ditto = trained(None), trained(DittoUpdateStrategy(personalization_epochs=3))
    assert _same(ditto.model.state_dict(), plain.model.state_dict())
    assert ditto.context.client.state["ditto"]["1.num_batches_tracked"].item() == 3


@pytest.mark.parametrize("told", [{"personalization_epochs": 3}, {"personalization": {"epochs": 3}}])
def test_the_configuration_sets_lambda_and_epochs(told: dict[str, Any]) -> None:
    expected = _own(_bowl(DittoUpdateStrategy(ditto_lambda=0.5, personalization_epochs=3)))
    strategy = DittoUpdateStrategyFromConfig()
    trainer = ComposableTrainer(
        Point(2.0),
        loss_strategy=half_square,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
        model_update_strategy=strategy,
        num_epochs=1,
        verbose=False,
    )
    configure(trainer, {"algorithm": {"ditto_lambda": 0.5, **told}})
    trainer.fit((torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)))
    assert _own(trainer) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ditto_lambda": -1}, "ditto_lambda: expected a number that is at least 0, got -1"),
        ({"personalization_epochs": -1}, "personalization_epochs: expected a whole number that is at least 0, got -1"),
    ],
)
def test_ditto_rejects_invalid_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Ditto(**given)
