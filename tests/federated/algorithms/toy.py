"""Small federations with known answers, for the tests of algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.algorithms import Algorithm
from dovetail.clients.simple import Client
from dovetail.federated.data.sources import Datasource
from dovetail.servers.fedavg import Server
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy, ShuffleDataLoaderStrategy

__all__ = ["Blobs", "Point", "Quadratics", "federation", "half_square", "mlp", "toy"]


class Quadratics(Datasource):
    """f_i(w) = a_i (w - b_i)² / 2; the optimum of the mean is at 0.25."""

    num_clients = 2

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        a, b = [(1.0, -2.0), (3.0, 1.0)][client_id - 1]
        return torch.tensor([[a, b]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


class Point(nn.Module):
    """One number, w."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0].sqrt() * (self.w - x[:, 1])


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().mean()


def toy(algorithm: Algorithm, *, start: float = 0.0, rounds: int = 200, **settings: Any) -> Server:
    """Run both quadratics: 10 steps of 0.05 a round."""
    trainer = ComposableTrainer(
        loss_strategy=half_square, optimizer_strategy=SGDOptimizerStrategy(lr=0.05), num_epochs=10, verbose=False
    )
    server = Server(
        Point(start), Quadratics(), algorithm, trainer=trainer, rounds=rounds, per_round=2, total_clients=2, **settings
    )
    server.run(Client(trainer=trainer))
    return server


class Blobs(Datasource):
    """Three classes and unequal clients, each with a different shift."""

    def __init__(self, sizes: Sequence[int] = (25, 7, 40, 16), dtype: torch.dtype = torch.float64) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.num_clients = len(sizes)

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        return self._drawn(client_id, self.sizes[client_id - 1])

    def test_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        return self._drawn(client_id + 1000, 12)

    def num_samples(self, client_id: int) -> int:
        return self.sizes[client_id - 1]

    def _drawn(self, seed: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 3, (size,), generator=generator)
        noise = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        centres = torch.eye(3, 6, dtype=torch.float64) * 2
        return (centres[labels] + noise + (seed % 1000) * 0.2).to(self.dtype), labels


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A body of two layers, `body`, and a `head`."""
    model = nn.Sequential()
    model.add_module("body", nn.Linear(6, 5))
    model.add_module("act", nn.Tanh())
    model.add_module("head", nn.Linear(5, 3))
    return model.to(dtype)


def federation(algorithm: Algorithm | None = None, *, trainer: Any = None, **settings: Any) -> Server:
    """Run four unequal clients of `Blobs` for three rounds, and return the server.

    Args:
        algorithm: None for FedAvg.
        trainer: The trainer of the clients; by default two epochs of shuffled batches of 8, and SGD with momentum.
        settings: Settings of the server, over `rounds=3`, `per_round=4` and `seed=3`; also `model`, `data`.
    """
    trainer = trainer or ComposableTrainer(
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.5),
        data_loader_strategy=ShuffleDataLoaderStrategy(),
        num_epochs=2,
        batch_size=8,
        verbose=False,
    )
    data = settings.pop("data", None) or Blobs()
    model = settings.pop("model", None) or mlp
    requests = {"rounds": 3, "per_round": data.num_clients, "total_clients": data.num_clients, "seed": 3, **settings}
    server = Server(model, data, algorithm, trainer=trainer, **requests)
    server.run(Client(trainer=trainer))
    return server
