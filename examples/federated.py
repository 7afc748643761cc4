"""A federation of twenty clients with few labels each, whose server trains one model for all of them."""

from __future__ import annotations

from pathlib import Path

from dovetail.clients import simple
from dovetail.federated.data import datasource
from dovetail.federated.servers.display import RoundDisplay
from dovetail.federated.servers.results import WriteResults
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy, ShuffleDataLoaderStrategy

RESULTS = Path("runs/federated")


def main() -> None:
    data = datasource("digits", num_clients=20, sampler="dirichlet", alpha=0.3, testset_sampler="iid")
    trainer = ComposableTrainer(
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9),
        data_loader_strategy=ShuffleDataLoaderStrategy(),
        num_epochs=3,
        batch_size=16,
    )
    server = fedavg.Server(
        datasource=data,
        trainer=trainer,
        rounds=15,
        per_round=8,
        callbacks=[RoundDisplay(), WriteResults(RESULTS)],
    )
    server.run(simple.Client(trainer=trainer))

    spread = server.evaluate_clients().spread("accuracy")
    print(f"on the clients' own test data: {spread.mean:.1%}, worst tenth {spread.worst:.1%}")
    print(f"rounds as table and picture: {RESULTS}")
    print(f"result: test accuracy {server.records[-1].metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
