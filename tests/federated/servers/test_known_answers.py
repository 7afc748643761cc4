"""Federations whose answers are known from elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from federation import Blobs, make_model, make_trainer
from torch import Tensor, nn

from dovetail.clients.simple import Client
from dovetail.federated.data.sources import Datasource
from dovetail.federated.selection import ClientSelection
from dovetail.runtime.seeds import derive_seed
from dovetail.servers.fedavg import Server
from dovetail.trainers.composable import ComposableTrainer


class Quadratics(Datasource):
    """f_i(w) = a_i (w - b_i)² / 2."""

    num_clients = 2

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        a, b = [(1.0, -2.0), (3.0, 1.0)][client_id - 1]
        return torch.tensor([[a, b]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0].sqrt() * (self.w - x[:, 1])


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().mean()


def _sgd(**options: Any) -> ComposableTrainer:
    return ComposableTrainer(criterion=_half_square, verbose=False, momentum=0.0, weight_decay=0.0, **options)


def test_fedavg_on_two_quadratics_has_the_known_answer() -> None:
    trainer = _sgd(optimizer=torch.optim.SGD, num_epochs=10, batch_size=1, learning_rate=0.05)
    server = Server(Point, Quadratics(), trainer=trainer, rounds=200, per_round=2, total_clients=2)
    server.run(Client(trainer=trainer))
    # After many rounds w is where the means of what K steps leave of it agree: 1 - (1 - ηa)^K of the way to b.
    ways = [1 - (1 - 0.05 * a) ** 10 for a in (1, 3)]
    assert server.weights["w"].item() == pytest.approx((-2 * ways[0] + ways[1]) / sum(ways), abs=1e-12)
    assert server.weights["w"].item() == pytest.approx(0.0005, abs=5e-5)


class AllInOne(Blobs):
    def __init__(self) -> None:
        super().__init__(num_clients=1)

    def num_samples(self, client_id: int) -> int:
        return 40


def test_one_client_with_all_data_equals_central_training() -> None:
    trainer = make_trainer(num_epochs=2, optimizer=torch.optim.Adam)
    server = Server(make_model, AllInOne(), trainer=trainer, rounds=1, per_round=1, seed=5)
    server.run(Client(trainer=trainer))
    central = make_trainer(num_epochs=2, optimizer=torch.optim.Adam)
    torch.manual_seed(derive_seed(5, "model"))
    central.model = make_model()
    seed = derive_seed(5, 1, 1)
    central.context.state["order_seed"] = derive_seed(seed, "order")
    torch.manual_seed(seed)
    central.fit(AllInOne().train_data(1))
    torch.testing.assert_close(server.weights, central.model.state_dict(), rtol=1e-5, atol=1e-6)


def test_one_full_batch_per_client_equals_gradient_descent_on_all_data() -> None:
    data = Blobs(6)
    model = nn.Linear(4, 3).double()
    trainer = ComposableTrainer(
        num_epochs=1, batch_size=1000, optimizer=partial(torch.optim.SGD, lr=0.3), verbose=False
    )

    class Doubles(Blobs):
        def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
            x, y = super().train_data(client_id)
            return x.double(), y

    server = Server(copy.deepcopy(model), Doubles(6, central=False), trainer=trainer, rounds=5, per_round=6)
    server.run(Client(trainer=trainer))
    parts = [data.train_data(client_id) for client_id in range(1, 7)]
    inputs, labels = torch.cat([x for x, _ in parts]).double(), torch.cat([y for _, y in parts])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(dict(server.weights), dict(model.state_dict()), rtol=1e-10, atol=1e-12)


def test_integer_buffers_remain_integers() -> None:
    server = Server(make_model, Blobs(), trainer=make_trainer(), rounds=3, per_round=8)
    server.run(Client(trainer=make_trainer()))
    counted = server.weights["1.num_batches_tracked"]
    # 2, 3 and 4 batches by turns, each counted by its samples, are 3.3 in the mean; and every round starts with a whole
    # number.
    assert counted.dtype == torch.int64
    assert counted.item() == 9
    assert server.model.state_dict()["1.num_batches_tracked"].item() == 9


class Unlucky(Blobs):
    """Some have no samples."""

    def __init__(self, *without: int) -> None:
        super().__init__()
        self._without = without

    def num_samples(self, client_id: int) -> int:
        return 0 if client_id in self._without else super().num_samples(client_id)


class InOrder(ClientSelection):
    """All that are there, in their order."""

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        return list(clients)


def test_clients_without_samples_change_nothing() -> None:
    def weights(data: Blobs, everyone: list[int]) -> dict[str, Tensor]:
        server = Server(make_model, data, trainer=make_trainer(), selection=InOrder(), rounds=2, per_round=8)
        server.members = everyone
        records = server.run(Client(trainer=make_trainer()))
        assert [(record.reported, record.faults) for record in records] == [(tuple(everyone), ())] * 2
        return dict(server.weights)

    some = weights(Unlucky(2, 5), list(range(1, 9)))
    torch.testing.assert_close(some, weights(Blobs(), [1, 3, 4, 6, 7, 8]), rtol=0, atol=0)


def test_without_any_samples_the_model_is_unchanged() -> None:
    server = Server(make_model, Unlucky(*range(1, 9)), trainer=make_trainer(), rounds=1, per_round=8)
    records = server.run(Client(trainer=make_trainer()))
    torch.manual_seed(derive_seed(1, "model"))
    torch.testing.assert_close(dict(server.weights), dict(make_model().state_dict()), rtol=0, atol=0)
    assert "train_loss" not in records[0].metrics
