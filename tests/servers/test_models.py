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
def test_the_model_is_that_of_whoever_has_one(server: dict[str, Any], client: dict[str, Any]) -> None:
    run = Server(datasource=Blobs(), rounds=1, per_round=2, **server)
    (record,) = run.run(Client(**client))
    assert isinstance(run.model, Mine)
    assert len(record.reported) == 2


def test_without_any_it_is_one_that_fits_the_data() -> None:
    run = Server(datasource=Blobs(), rounds=1, per_round=2)
    run.run()
    assert type(run.model) is nn.Linear


def test_a_model_that_is_made_is_made_from_the_seed() -> None:
    first, second, third = (Server(Mine, Blobs(), rounds=0, seed=seed) for seed in (1, 1, 2))
    for run in (first, second, third):
        run.run()
    assert torch.equal(first.weights["weight"], second.weights["weight"])
    assert not torch.equal(first.weights["weight"], third.weights["weight"])
