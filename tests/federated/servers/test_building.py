"""Federations from configurations."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dovetail.clients import simple
from dovetail.data.models import cnn
from dovetail.errors import ConfigError
from dovetail.federated.config import FederatedConfig
from dovetail.federated.servers.building import federation
from dovetail.federated.servers.reading import read_federated
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy

SMALL = {
    "clients": {"total_clients": 4, "per_round": 2},
    "trainer": {"rounds": 3, "epochs": 2, "batch_size": 16, "optimizer": "SGD"},
    "parameters": {"optimizer": {"lr": 0.1, "momentum": 0.5}},
}


def test_a_configuration_gives_the_same_federation_as_its_objects() -> None:
    server, client = federation(read_federated(SMALL))
    server.run(client)
    trainer = ComposableTrainer(
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.5), num_epochs=2, batch_size=16, verbose=False
    )
    by_hand = fedavg.Server(trainer=trainer, rounds=3, total_clients=4, per_round=2)
    by_hand.run(simple.Client(trainer=trainer))
    for name, value in server.weights.items():
        assert torch.equal(value, by_hand.weights[name]), name


def test_the_keyword_arguments_of_the_seed_document_work_without_a_file() -> None:
    trainer = ComposableTrainer(optimizer_strategy=SGDOptimizerStrategy(lr=0.1))
    client = simple.Client(trainer=trainer)
    server = fedavg.Server(trainer=trainer, rounds=2)
    records = server.run(client)
    assert [record.round for record in records] == [1, 2]
    assert trainer.model is None


def test_a_global_schedule_continues_across_rounds() -> None:
    rates = []
    reported = {
        **SMALL,
        "trainer": {**SMALL["trainer"], "lr_scheduler": "ExponentialLR", "global_lr_scheduler": True},
        "parameters": {"optimizer": {"lr": 1.0}, "learning_rate": {"gamma": 0.5}},
    }
    from dovetail.callbacks import Callback

    class Rates(Callback):
        def on_epoch_start(self, context: object) -> None:
            rates.append((context.current_round, context.optimizers[0].param_groups[0]["lr"]))

    server, client = federation(read_federated(reported).with_settings(per_round=1))
    server.run(simple.Client(trainer=client._given_trainer, trainer_callbacks=[Rates()]))
    assert rates == [(1, 1.0), (1, 0.5), (2, 0.25), (2, 0.125), (3, 0.0625), (3, 0.03125)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"algorithm": {"mu": 1}}, "algorithm.mu: unknown key (known: cross_silo, "),
        ({"parameters": {"model": {"hidden": [3]}}}, "parameters.model: it has no effect without trainer.model_type"),
        (
            {"trainer": {"model_type": "mlp"}, "parameters": {"model": {"hiden": [3]}}},
            "unknown argument of model 'mlp' 'hiden': did you mean 'hidden'?",
        ),
    ],
)
def test_unknown_arguments_are_rejected(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        federation(read_federated(change))
    assert sentence in str(caught.value)


def test_settings_given_twice_are_rejected() -> None:
    config = FederatedConfig().with_settings(rounds=3, seed=5, sampler="noniid")
    assert (config.trainer.rounds, config.server.random_seed, config.data.sampler) == (3, 5, "noniid")
    with pytest.raises(ConfigError, match="do_test: clients and server both have it; give the section"):
        config.with_settings(do_test=True)
    with pytest.raises(ConfigError, match="unknown setting 'roundz': did you mean 'rounds'"):
        config.with_settings(roundz=3)


def test_a_model_that_does_not_fit_the_data_raises_before_training() -> None:
    server, client = federation(read_federated({**SMALL, "trainer": {**SMALL["trainer"], "model_type": "lenet5"}}))
    with pytest.raises(ConfigError, match=r"model_type: lenet5 does not take samples of shape \(1, 8, 8\)"):
        server.run(client)


def test_a_model_chosen_by_name_is_tried_on_the_data_without_side_effects() -> None:
    parameters = {**SMALL["parameters"], "model": {"size": 8}}
    server, client = federation(read_federated({**SMALL, "parameters": parameters}, ["trainer.model_type=cnn"]))
    server.run(client)
    nameless, client = federation(read_federated(SMALL))
    by_hand = fedavg.Server(partial(cnn, size=8), trainer=nameless._given_trainer, config=nameless.config)
    by_hand.run(client)
    for name, value in server.weights.items():
        assert torch.equal(value, by_hand.weights[name]), name
