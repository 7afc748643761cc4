"""Demo `dovetail demo federated`: clients with different digits train one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail.algorithms import SCAFFOLD, Algorithm, FedAvg
from dovetail.clients import simple
from dovetail.data.datasets import digits
from dovetail.data.models import mlp
from dovetail.demos.catalogue import Outcome
from dovetail.demos.pictures import BLUE, ORANGE, picture
from dovetail.federated.data.partition import label_quantity
from dovetail.federated.data.sources import PartitionedData
from dovetail.federated.servers.display import RoundDisplay
from dovetail.history.drawing import INK, tidy
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy, ShuffleDataLoaderStrategy
from dovetail.units import counted

_NUM_CLIENTS = 10


def run(folder: Path, *, rounds: int = 30) -> Outcome:
    """Run a federation with two algorithms, and draw the clients' data and the accuracy of the global model."""
    train, test = digits(split=(0.8, 0.2))
    labels = train.tensors[1]
    # Two digits per client make local steps drift apart, which SCAFFOLD corrects and FedAvg does not.
    cut = label_quantity(labels, _NUM_CLIENTS, classes_per_client=2)
    data = PartitionedData(train.tensors, cut, test=test.tensors, model=partial(mlp, 64, 10))
    accuracies: dict[str, list[float]] = {}
    algorithms: tuple[Algorithm, ...] = (FedAvg(), SCAFFOLD())
    for algorithm in algorithms:
        name = type(algorithm).__name__
        print(f"{name}:")
        accuracies[name] = _accuracies(data, algorithm, rounds)

    picture(folder / "rounds.png", (11, 4.4), partial(_draw, cut.table(labels), accuracies))
    found = ", ".join(f"{name} {values[-1]:.1%}" for name, values in accuracies.items())
    every_fifth = [number for number in range(1, rounds + 1) if number in (1, rounds) or number % 5 == 0]
    return Outcome(
        f"test accuracy after {counted(rounds, 'round')}: {found}",
        {"rounds.png": "the digits of each client, and the accuracy of both global models by round"},
        ("round", *accuracies),
        [[str(number), *(f"{values[number - 1]:.1%}" for values in accuracies.values())] for number in every_fifth],
    )


def _accuracies(data: PartitionedData, algorithm: Algorithm, rounds: int) -> list[float]:
    """Return the global model's accuracy on the server's test data after each round; half of the clients train."""
    trainer = ComposableTrainer(
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
        data_loader_strategy=ShuffleDataLoaderStrategy(),
        # Many local epochs per round enlarge the drift that the demo shows.
        num_epochs=5,
        batch_size=16,
        verbose=False,
    )
    server = fedavg.Server(
        datasource=data,
        algorithm=algorithm,
        trainer=trainer,
        callbacks=[RoundDisplay()],
        rounds=rounds,
        per_round=_NUM_CLIENTS // 2,
    )
    return [record.metrics["accuracy"] for record in server.run(simple.Client(trainer=trainer))]


def _draw(table: Tensor, accuracies: Mapping[str, Sequence[float]], figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    left.imshow(table.T.numpy(), cmap="Blues", origin="lower", aspect="auto")
    tidy(left, "images per client and digit", x="client", y="digit")
    left.grid(visible=False)
    left.set_xticks(range(len(table)), range(1, len(table) + 1))
    left.set_yticks(range(table.shape[1]))
    # Cells above this count have a dark blue, on which black numbers would not be readable.
    dark = 0.45 * int(table.max())
    for client, counts in enumerate(table.tolist()):
        for digit, count in enumerate(counts):
            if count:
                text = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if count > dark else INK}
                left.text(client, digit, count, **text)

    for (name, values), colour in zip(accuracies.items(), (BLUE, ORANGE), strict=True):
        right.plot(range(1, len(values) + 1), values, color=colour, linewidth=1.8, marker="o", markersize=4, label=name)
    tidy(right, "test accuracy of the global model", x="round")
    right.set_ylim(0, 1)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(frameon=False, fontsize=10, labelcolor=INK, loc="lower right")
