"""Whose model a federation trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federation import Blobs
from torch import nn

from dovetail.clients.simple import Client
from dovetail.servers.fedavg import Server
from dovetail.trainers.composable import ComposableTrainer


class Mine(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


def _trainer(model: Any = None) -> ComposableTrainer:
    return ComposableTrainer(model, num_epochs=1, verbose=False)


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ({"model": Mine}, {}),
        ({"model": Mine()}, {"model": nn.Linear(4, 3)}),
        ({}, {"model": Mine}),
        ({"trainer": _trainer(Mine())}, {}),
        ({}, {"trainer": _trainer(Mine())}),
        ({"trainer": _trainer()}, {"trainer": _trainer(Mine())}),
        ({"trainer": lambda: _trainer(Mine())}, {}),
        ({}, {"trainer": lambda: _trainer(Mine())}),
    ],
)
def test_the_model_is_taken_from_the_first_component_that_has_one(
    server: dict[str, Any], client: dict[str, Any]
) -> None:
    run = Server(datasource=Blobs(), rounds=1, per_round=2, **server)
    (record,) = run.run(Client(**client))
    assert isinstance(run.model, Mine)
    assert len(record.reported) == 2


class Features(Blobs):
    """Regression: the target is a sum of the features."""

    def train_data(self, client_id: int) -> Any:
        inputs, _ = super().train_data(client_id)
        return inputs, inputs.sum(1, keepdim=True)

    def central_test_data(self) -> None:
        return None


@pytest.mark.parametrize("client", [None, Client()])
def test_a_client_without_a_trainer_uses_the_trainer_of_the_server(client: Client | None) -> None:
    trainer = ComposableTrainer(
        nn.Linear(4, 1), loss_strategy=nn.MSELoss(), num_epochs=5, learning_rate=0.1, verbose=False
    )
    run = Server(trainer=trainer, datasource=Features(), rounds=2, per_round=2)
    losses = [record.metrics["train_loss"] for record in run.run(client)]
    assert losses[1] < losses[0]
    assert [record.faults for record in run.records] == [(), ()]


def test_without_a_model_the_server_builds_one_that_fits_the_data() -> None:
    run = Server(datasource=Blobs(), rounds=1, per_round=2)
    run.run()
    assert type(run.model) is nn.Linear


def test_a_built_model_is_initialized_from_the_seed() -> None:
    first, second, third = (Server(Mine, Blobs(), rounds=0, seed=seed) for seed in (1, 1, 2))
    for run in (first, second, third):
        run.run()
    assert torch.equal(first.weights["weight"], second.weights["weight"])
    assert not torch.equal(first.weights["weight"], third.weights["weight"])
