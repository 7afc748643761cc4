"""The federations that tests run and kill: tiny, and with everything that has state.

`python federation.py FOLDER KIND DIE_AT` runs one from wherever its checkpoints stand, and writes down what comes out.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.algorithms import Algorithm, FedBuff
from dovetail.checkpoint.encoding import encode
from dovetail.clients.simple import Client
from dovetail.federated.averaging import Average, moved
from dovetail.federated.data.sources import Datasource
from dovetail.federated.messages import Update, Weights
from dovetail.servers.fedavg import Server
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies.base import ModelUpdateStrategy


class Blobs(Datasource):
    """Three clouds of points, differently shared out; every client has its own number of samples."""

    def __init__(self, num_clients: int = 8, *, central: bool = True, own_tests: bool = False) -> None:
        self.num_clients = num_clients
        self.central, self.own_tests = central, own_tests

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        return _points(client_id, self.num_samples(client_id))

    def num_samples(self, client_id: int) -> int:
        return 4 * (2 + client_id % 3)

    def test_data(self, client_id: int) -> tuple[Tensor, Tensor] | None:
        return _points(10**6 + client_id, 8) if self.own_tests else None

    def central_test_data(self) -> tuple[Tensor, Tensor] | None:
        return _points(0, 64) if self.central else None

    def default_model(self) -> nn.Module:
        return nn.Linear(4, 3)


def _points(seed: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (number,), generator=generator)
    return torch.eye(3, 4)[labels] + 0.5 * torch.randn(number, 4, generator=generator), labels


def make_model() -> nn.Module:
    """Return a model with buffers, whole numbers among them, and with randomness."""
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 3))


def make_trainer(**options: Any) -> ComposableTrainer:
    return ComposableTrainer(**{"num_epochs": 1, "batch_size": 4, "learning_rate": 0.1, "verbose": False, **options})


class Remembering(ModelUpdateStrategy):
    """Trains by what the server sent and by what the client remembers, which it changes in place."""

    def on_train_start(self, context: Any) -> None:
        assert context.model is not None
        shape = next(context.model.parameters())
        context.client.state.setdefault("remembering", {"rounds": 0, "drift": torch.zeros_like(shape)})
        self._start = shape.detach().clone()

    def on_gradients(self, optimizer: Any, context: Any) -> None:
        first = next(context.model.parameters())
        first.grad.add_(0.1 * context.client.payload["momentum"] - 0.1 * context.client.state["remembering"]["drift"])

    def on_train_end(self, context: Any) -> None:
        own = context.client.state["remembering"]
        own["rounds"] += 1
        own["drift"].add_(next(context.model.parameters()).detach() - self._start)

    def get_update_payload(self, context: Any) -> dict[str, Any]:
        return {"drift": context.client.state["remembering"]["drift"]}


class Everything(Algorithm):
    """Has state at the server and at clients, sends more than weights both ways, and leaves the head with clients."""

    def __init__(self) -> None:
        self.momentum = torch.zeros(5, 4)
        self.rounds = 0

    def equip(self, strategies: Any) -> dict[str, Any]:
        return {"model_update": Remembering()}

    def is_local(self, name: str) -> bool:
        return name.startswith("4.")

    def payload(self, client_id: int) -> dict[str, Any]:
        return {"momentum": self.momentum, "rounds": self.rounds}

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        self.rounds += 1
        drift = torch.stack([update.payload["drift"] for update in updates]).mean(dim=0)
        self.momentum = 0.9 * self.momentum + 0.1 * drift
        return moved(weights, average(updates))

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.momentum, self.rounds = state["momentum"], state["rounds"]


ASYNCHRONOUS = {
    "synchronous": False,
    "minimum_clients_aggregated": 2,
    "staleness_bound": 2,
    "speed_simulation": True,
    "simulation_distribution": {"distribution": "pareto", "alpha": 1.0},
}

# The killed federations: each with another kind of state.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"algorithm": Everything, "postprocessors": [{"top_k": {"ratio": 0.5, "error_feedback": True}}]},
    "asynchronous": {**ASYNCHRONOUS, "algorithm": FedBuff, "selection_name": "oort"},
    "asynchronous, everything": {**ASYNCHRONOUS, "algorithm": Everything, "selection_name": "round_robin"},
    "cross-silo": {"cross_silo": True, "total_silos": 2, "local_rounds": 2, "algorithm": Everything},
}


def make_server(kind: str = "plain", folder: Path | None = None, **options: Any) -> Server:
    settings = {"rounds": 5, "per_round": 4, "seed": 3, **KINDS[kind], **options}
    name = settings.pop("selection_name", "random")
    config = Server(per_round=4).config
    config = config.with_settings(server=_with(config.server, selection=name))
    data = settings.pop("datasource", Blobs())
    return Server(
        make_model,
        data,
        trainer=make_trainer(),
        config=config,
        checkpoint_path=None if folder is None else str(folder / "checkpoints"),
        **settings,
    )


def _with(section: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(section, **changes)


def outcome(server: Server) -> str:
    """Return all that a run has come to, as text in which equal bits are equal."""
    records = [record.to_plain() for record in server.records]
    if server.config.server.synchronous:
        for record in records:
            del record["elapsed_time"]
    clients = {str(client_id): server.states.get(client_id) for client_id in range(1, 9)}
    kept = {"weights": dict(server.weights), "clients": clients, "algorithm": server.algorithm.state_dict()}
    encoded = encode(kept)
    digest = hashlib.sha256(encoded.text)
    for block in encoded.blocks:
        digest.update(block.tensor.detach().contiguous().numpy().tobytes())
    return json.dumps({"records": records, "digest": digest.hexdigest()}, indent=1)


def main() -> None:
    folder, kind, die_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    if die_at:
        _die_at(folder, die_at)
    server = make_server(kind, folder)
    os.write(1, b".")
    server.run(Client(trainer=make_trainer()))
    (folder / "result.txt").write_text(outcome(server))


_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "sqlite3.connect")


def _die_at(folder: Path, number: int) -> None:
    """Be killed just before the n-th operation that changes a file or a directory of the checkpoints."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in _CHANGES and not (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        name = os.fspath(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else ""
        if str(name).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
