"""FedAvg followed by fine-tuning at the clients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toy import Blobs, federation, mlp

from dovetail.algorithms import CompositeAlgorithm, FedAvg, FedProx
from dovetail.federated.algorithms.finetune import FedAvgFinetune, FinetuneUpdateStrategy
from dovetail.testing import AlgorithmContract, ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy


class TestFedAvgFinetune(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedAvgFinetune:
        return FedAvgFinetune()


class TestStrategy(ModelUpdateStrategyContract):
    def make(self) -> FinetuneUpdateStrategy:
        return FinetuneUpdateStrategy()


def test_before_the_personalization_round_finetune_equals_fedavg() -> None:
    ours, theirs = federation(FedAvgFinetune()), federation(FedAvg())
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=0)
    assert ours.evaluate_clients().metrics == theirs.evaluate_clients().metrics


def test_a_client_fine_tunes_the_whole_global_model() -> None:
    def trainer(**options: int) -> ComposableTrainer:
        optimizer = SGDOptimizerStrategy(lr=0.2, momentum=0.5)
        return ComposableTrainer(optimizer_strategy=optimizer, batch_size=50, verbose=False, **options)

    server = federation(FedAvgFinetune(), trainer=trainer(num_epochs=1))
    found = server.personalize([3], epochs=6)
    alone = trainer(num_epochs=6)
    alone.model = mlp()
    alone.model.load_state_dict(server.weights)
    alone.fit(Blobs().train_data(3))
    torch.testing.assert_close(server.states.get(3)["personal"], dict(alone.model.state_dict()), rtol=0, atol=1e-12)
    assert found.metrics[3]["accuracy"] == alone.evaluate(Blobs().test_data(3))["accuracy"]


def test_a_client_keeps_using_its_fine_tuned_model() -> None:
    server = federation(FedAvgFinetune())
    before = server.evaluate_clients().metrics
    found = server.personalize([1, 2], epochs=5).metrics
    after = server.evaluate_clients().metrics
    assert {client_id: after[client_id] for client_id in (1, 2)} == found
    assert {client_id: after[client_id] for client_id in (3, 4)} == {it: before[it] for it in (3, 4)}
    assert all(found[client_id] != before[client_id] for client_id in found)


def test_buffers_are_fine_tuned_too() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    server = federation(FedAvgFinetune(), model=model, data=Blobs(sizes=(24, 16)))
    found = server.personalize()
    assert not torch.equal(server.states.get(1)["personal"]["1.running_mean"], server.weights["1.running_mean"])
    assert server.evaluate_clients().metrics == found.metrics


def test_finetune_works_with_proximal_algorithms() -> None:
    server = federation(CompositeAlgorithm([FedProx(mu=0.5), FedAvgFinetune()]))
    assert sorted(server.personalize(epochs=1).metrics) == [1, 2, 3, 4]


def test_fine_tuned_clients_improve_on_their_data() -> None:
    server = federation(FedAvgFinetune(), rounds=1)
    before = server.evaluate_clients().mean("accuracy")
    assert server.personalize(epochs=30).mean("accuracy") > before


@pytest.mark.parametrize("backend", ["process", "vectorized"])
def test_the_personalization_round_is_equal_on_every_backend(backend: str) -> None:
    alone, other = federation(FedAvgFinetune()), federation(FedAvgFinetune(), backend=backend, num_workers=2)
    for server in (alone, other):
        server.personalize(epochs=2)
    torch.testing.assert_close(other.states.get(4)["personal"], alone.states.get(4)["personal"], rtol=0, atol=1e-10)
