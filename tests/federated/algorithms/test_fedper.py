"""FedPer: a local head for each client, trained together with the body."""

from __future__ import annotations

import pytest
import torch
from toy import Blobs, federation, mlp

from dovetail.algorithms import SCAFFOLD, CompositeAlgorithm, FedAvg, FedProx
from dovetail.federated.algorithms.fedper import FedPer, FedPerUpdateStrategy, FedPerUpdateStrategyFromConfig
from dovetail.federated.algorithms.server_optimizers import FedAdam
from dovetail.testing import AlgorithmContract, ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import SGDOptimizerStrategy, StateTrackingUpdateStrategy


class TestFedPer(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedPer:
        return FedPer()


@pytest.mark.torture
class TestFedPerWithOthers(AlgorithmContract):
    vectorizes = True

    def make(self) -> CompositeAlgorithm:
        return CompositeAlgorithm([FedPer(global_layer_names="0"), FedProx(mu=0.1), FedAdam()])


class TestStrategy(ModelUpdateStrategyContract):
    def make(self) -> FedPerUpdateStrategy:
        return FedPerUpdateStrategy(global_layer_names=["0"])


class TestFromConfig(ModelUpdateStrategyContract):
    def make(self) -> FedPerUpdateStrategyFromConfig:
        return FedPerUpdateStrategyFromConfig()


def test_fedper_with_one_client_equals_central_training() -> None:
    data = Blobs(sizes=(40,))

    def trainer(**options: int) -> ComposableTrainer:
        optimizer = SGDOptimizerStrategy(lr=0.3)
        return ComposableTrainer(optimizer_strategy=optimizer, batch_size=40, verbose=False, **options)

    server = federation(FedPer(), data=data, trainer=trainer(num_epochs=2), rounds=3)
    central = trainer(num_epochs=6)
    central.model = server._initial_model
    central.fit(data.train_data(1))
    ours = {**server.weights, **server.states.get(1)["model"]}
    torch.testing.assert_close(ours, dict(central.model.state_dict()), rtol=0, atol=1e-12)


def test_in_the_first_round_the_body_equals_fedavg() -> None:
    ours, theirs = federation(FedPer(), rounds=1), federation(FedAvg(), rounds=1)
    for name in ("body.weight", "body.bias"):
        assert torch.equal(ours.weights[name], theirs.weights[name])


def test_a_fleet_ends_where_clients_alone_do() -> None:
    alone, fleet = (federation(FedPer(), backend=backend) for backend in ("sequential", "vectorized"))
    torch.testing.assert_close(fleet.weights, alone.weights, rtol=0, atol=1e-10)
    for client_id in range(1, 5):
        ours, theirs = (server.states.get(client_id)["model"] for server in (fleet, alone))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_the_update_strategy_of_the_trainer_is_kept() -> None:
    trainer = ComposableTrainer(model_update_strategy=StateTrackingUpdateStrategy(), batch_size=8, verbose=False)
    with_it = federation(FedPer(), trainer=trainer, rounds=1)
    assert not with_it.records[0].faults


def test_fedper_works_with_scaffold() -> None:
    server = federation(CompositeAlgorithm([SCAFFOLD(), FedPer()]))
    assert not any(record.faults for record in server.records)
    assert all(value.isfinite().all() for value in server.weights.values())


@pytest.mark.parametrize("told", [{"global_layer_names": ["body"]}, {"local_layer_names": "head"}])
def test_the_configuration_names_the_layers(told: dict[str, object]) -> None:
    context = TrainingContext(mlp())
    context.config |= {"algorithm": told, "rounds": 1}
    context.current_round = 2
    strategy = FedPerUpdateStrategyFromConfig()
    strategy.on_train_start(context)
    assert [name for name, it in context.model.named_parameters() if it.requires_grad] == ["head.weight", "head.bias"]
    strategy.on_train_end(context)
    assert all(it.requires_grad for it in context.model.parameters())
