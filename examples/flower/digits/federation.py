"""What server and clients must agree on."""

from __future__ import annotations

from flwr.app import Context

from dovetail.clients import simple
from dovetail.federated.servers.display import RoundDisplay
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy


def server(context: Context) -> fedavg.Server:
    clients = int(context.run_config["clients"])
    return fedavg.Server(
        rounds=int(context.run_config["rounds"]),
        total_clients=clients,
        per_round=clients,
        callbacks=[RoundDisplay],
    )


def client(context: Context) -> simple.Client:
    rate = float(context.run_config["learning-rate"])
    optimizer = SGDOptimizerStrategy(lr=rate)
    return simple.Client(trainer=ComposableTrainer(optimizer_strategy=optimizer, num_epochs=2, batch_size=16))
