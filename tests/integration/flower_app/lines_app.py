"""A federation of two clients, as a Flower app and for a run without Flower."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from torch import nn

from dovetail.algorithms import Algorithm
from dovetail.clients import simple
from dovetail.federated import ServerCallback
from dovetail.federated.data.sources import Datasource
from dovetail.federated.flower import client_app, server_app
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import MSELossStrategy

NUM_ROUNDS = 3
# The round in which the node of a client is killed.
KILLED_ROUND, KILLED_CLIENT = 2, 2


class Lines(Datasource):
    """Every client has a different line, with more points the larger its id is."""

    num_clients = 2

    def train_data(self, client_id: int) -> Any:
        x = torch.linspace(-1, 1, 12 * client_id).unsqueeze(1)
        return x, client_id * x + 0.5

    def central_test_data(self) -> Any:
        return self.train_data(1)


class Personal(Algorithm):
    """The bias stays with clients, in a state that lives at the node."""

    def is_local(self, name: str) -> bool:
        return name == "2.bias"


class Stopped(simple.Client):
    """Does not come back from one task: its process waits until it is ended."""

    marker: Path | None = None

    def work(self, task: Any, state: Any) -> Any:
        if (task.round, task.client_id) == (KILLED_ROUND, KILLED_CLIENT):
            if self.marker is None:
                raise RuntimeError("killed")
            self.marker.touch()
            threading.Event().wait()
        return super().work(task, state)


class Save(ServerCallback):
    """Keeps the weights and the record of every round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_clients_processed(self, server: Any) -> None:
        unfinished = self.folder / "unfinished"
        torch.save({"weights": dict(server.weights), "record": server.records[-1].to_plain()}, unfinished)
        unfinished.rename(self.folder / f"{server.current_round}.pt")


def federation(folder: Path, *, is_flower: bool) -> tuple[fedavg.Server, simple.Client]:
    """The server and the client, which write their results to a folder."""
    server = fedavg.Server(
        model=lambda: nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.Linear(8, 1)),
        datasource=Lines(),
        algorithm=Personal(),
        callbacks=[Save(folder)],
        rounds=NUM_ROUNDS,
        total_clients=2,
        per_round=2,
    )
    loss = MSELossStrategy()
    trainer = ComposableTrainer(loss_strategy=loss, num_epochs=2, batch_size=4, learning_rate=0.05)
    client = Stopped(trainer=trainer)
    client.marker = folder / "stopped" if is_flower else None
    return server, client


def _folder(context: Context) -> Path:
    return Path(str(context.run_config["folder"]))


def _server(context: Context) -> fedavg.Server:
    return federation(_folder(context), is_flower=True)[0]


def _client(context: Context) -> simple.Client:
    return federation(_folder(context), is_flower=True)[1]


serverapp = server_app(_server, _client)
clientapp = client_app(_client, _server)
