"""One round of a peer's federation for every line that is read: what `federated.py` starts in the peer's own Python.

    python benchmarks/federated_peers.py pfl job.pt

The job is a file of tensors and numbers that `federated.py` writes. The peer prints `ready` before the first round and
`done` after every round. It shuts down when its input is closed, so that no measured round contains the shutdown.
Nothing of Dovetail is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


@cache
def job(path: str) -> dict[str, Any]:
    """Return the job; read once in every process."""
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def make_model(name: str) -> nn.Module:
    """Return the model of a workload, in the layout of its weights."""
    if name == "synthetic":
        return nn.Linear(60, 10)
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 120), nn.ReLU(), nn.Linear(120, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def loaded_model(path: str) -> nn.Module:
    """Return the model with the weights that all contestants begin with."""
    model = make_model(job(path)["model"])
    # By position: a lone layer may have a name of its own there.
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), job(path)["weights"].values(), strict=True):
            parameter.copy_(value)
    return model


def wait_for_round(word: str) -> None:
    """Say what happened, and wait to be asked for the next round."""
    print(word, flush=True)
    if not sys.stdin.readline():
        sys.exit()


def each_round(chosen: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield the clients of a round when it is requested, and return when the input is closed after the last round.

    `done` is printed before the caller gets the next round or leaves its loop: what a library does at its end, such as
    closing a Ray cluster, would otherwise be measured as a part of the last round.
    """
    word = "ready"
    for clients in chosen:
        wait_for_round(word)
        word = "done"
        yield clients
    print(word, flush=True)
    sys.stdin.read()


def by_hand(path: str, part: int) -> None:
    """Train this half of every round's clients with the lean loop, and share nothing with the other half."""
    work = job(path)
    model = loaded_model(path)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=work["lr"])
    parts = []
    for chosen in work["chosen"]:
        shares: list[list[int]] = [[], []]
        for client_id in sorted(chosen, key=lambda it: -len(work["data"][it][1])):
            min(shares, key=lambda share: sum(len(work["data"][it][1]) for it in share)).append(client_id)
        parts.append(shares[part])
    for clients in each_round(parts):
        for client_id in clients:
            inputs, targets = work["data"][client_id]
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), work["weights"].values(), strict=True):
                    parameter.copy_(value)
            for _ in range(work["epochs"]):
                for indices in torch.randperm(len(inputs)).split(work["batch_size"]):
                    optimizer.zero_grad()
                    criterion(model(inputs[indices]), targets[indices]).backward()
                    optimizer.step()


def with_pfl(path: str) -> None:
    """Run pfl's FederatedAveraging on its SimulatedBackend."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    work = job(path)

    class WithLoss(nn.Module):
        """What pfl wants of a module: its loss, and metrics."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = loaded_model(path)
            self.criterion = nn.CrossEntropyLoss()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.inner(inputs)
            return outputs

        def loss(self, inputs: Tensor, targets: Tensor, is_eval: bool = False) -> Tensor:
            loss: Tensor = self.criterion(self.inner(inputs), targets)
            return loss

        def metrics(self, inputs: Tensor, targets: Tensor, is_eval: bool = True) -> dict[str, Any]:
            return {}

    class Pace(TrainingProcessCallback):  # type: ignore[misc]  # pfl has no types here
        """Makes one round when it is asked for."""

        def on_train_begin(self, *, model: Any) -> Any:
            wait_for_round("ready")
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            wait_for_round("done")
            return False, Metrics()

    data = {client_id: Dataset(raw_data=tensors) for client_id, tensors in work["data"].items()}
    coming = iter([client_id for chosen in work["chosen"] for client_id in chosen])
    federated = FederatedDataset(lambda client_id: data[client_id], lambda: next(coming))
    module = WithLoss()
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=len(work["chosen"]),
            evaluation_frequency=1_000_000,
            train_cohort_size=len(work["chosen"][0]),
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=federated, val_data=federated),
        model,
        NNTrainHyperParams(
            local_num_epochs=work["epochs"], local_learning_rate=work["lr"], local_batch_size=work["batch_size"]
        ),
        NNEvalHyperParams(local_batch_size=work["batch_size"]),
        callbacks=[Pace()],
    )


def with_flower(path: str) -> None:
    """Run Flower's FedAvg on its simulation engine, by its messages: its older API waits seconds in every round."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    work, client, server = job(path), ClientApp(), ServerApp()

    @client.train()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
    def train(message: Any, context: Any) -> Any:
        """Train on the data of the client that the message names, with the usual loop."""
        torch.set_num_threads(1)
        work = job(path)
        model = make_model(work["model"])
        model.load_state_dict(message.content["weights"].to_torch_state_dict())
        inputs, targets = work["data"][message.content["config"]["client"]]
        criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=work["lr"])
        for _ in range(work["epochs"]):
            for indices in torch.randperm(len(inputs)).split(work["batch_size"]):
                optimizer.zero_grad()
                criterion(model(inputs[indices]), targets[indices]).backward()
                optimizer.step()
        count = MetricRecord({"num-examples": len(inputs)})
        answer = RecordDict({"weights": ArrayRecord(model.state_dict()), "count": count})
        return Message(content=answer, reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
    def main(grid: Any, context: Any) -> None:
        """Make one round when it is asked for, of the clients that all contestants have."""
        weights, strategy = ArrayRecord(loaded_model(path).state_dict()), FedAvg()
        nodes: list[int] = []
        while len(nodes) < len(work["chosen"][0]):
            nodes = list(grid.get_node_ids())
        for number, chosen in enumerate(each_round(work["chosen"])):
            asked = [
                RecordDict({"weights": weights, "config": ConfigRecord({"client": client_id})}) for client_id in chosen
            ]
            answers = list(
                grid.send_and_receive(
                    Message(content=each, message_type="train", dst_node_id=node)
                    for each, node in zip(asked, nodes, strict=True)
                )
            )
            if failed := [answer for answer in answers if answer.has_error()]:
                raise RuntimeError(f"{len(failed)} clients failed: {failed[0].error}")
            weights, _ = strategy.aggregate_train(number, answers)

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=len(work["chosen"][0]),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    # By its name, so that processes which a peer starts find what they are sent.
    import federated_peers

    torch.set_num_threads(1)
    kind, path = sys.argv[1:]
    {
        "pfl": federated_peers.with_pfl,
        "flower": federated_peers.with_flower,
        "hand-1": lambda path: federated_peers.by_hand(path, 0),
        "hand-2": lambda path: federated_peers.by_hand(path, 1),
    }[kind](path)
