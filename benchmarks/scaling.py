"""How cost grows: the slopes that `docs/scaling.md` reckons with, each measured over a range that fits this machine.

    python benchmarks/scaling.py

- a round against its clients (sequential, one small step each): what a client costs around its steps
- the memory of a server against the clients of a round: what it holds until it aggregates
- a step of two processes against the bytes of the gradients, beyond the same step alone (gloo over the loopback)
- a checkpoint against its bytes
- the store of an experiment against its trials (SQLite): writing one more, and reading all

A slope is that of the straight line through one round of measurements. What lies beyond the largest point was not
measured.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pair import run_pair
from report import Curve, Row, Section, Table, parser

__all__ = ["main"]

ROUNDS = (9, 2)
CLIENTS, COHORTS = (8, 16, 32, 64), (16, 32, 64, 128)
MEGABYTES = (1, 4, 16, 32)
TRIALS = (50, 100, 200, 400)
# Inputs and outputs of a model; the large one has a megabyte of weights, and hardly any data.
SMALL, LARGE = (64, 8), (512, 512)


def main(arguments: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--cohort", type=int, help="print the megabytes that a server of so many clients a round takes")
    words.add_argument("--rank-file", type=Path, help="be one of two processes: write their times to this file")
    options = words.parse_args(arguments)
    rounds, few = ROUNDS[options.quick], -2 if options.quick else None
    if options.cohort is not None:
        print(server_memory(options.cohort))
        return 0
    if options.rank_file is not None:
        return as_rank(options.rank_file, rounds, MEGABYTES[:few])

    section = Section(
        "scaling",
        "Slopes",
        "How cost grows with clients, parameters, bytes and trials, over the ranges in the figure; "
        "[the model of cost](../docs/scaling.md) reckons with these slopes.",
        is_quick=options.quick,
    )
    section.curves += [
        clients(CLIENTS[:few], rounds),
        cohorts(COHORTS[:few], 1 if options.quick else 3),
        gradients(options.quick),
        checkpoints(MEGABYTES[:few], rounds),
        *trials(TRIALS[:few], rounds),
    ]
    units = (
        "ms per client",
        "MB per client, for a model of 1 MB",
        "ms per MB of gradients",
        "ms per MB",
        "ms per trial that is there",
        "ms per trial",
    )
    rows = []
    for curve, unit in zip(section.curves, units, strict=True):
        slopes, starts = zip(*curve.lines, strict=True)
        measured = f"{min(curve.xs):g} to {max(curve.xs):g}"
        cells = (unit, f"{statistics.median(starts):.3g}", f"{curve.x}, {measured}")
        rows.append(Row(curve.title, slopes, cells=cells))
    section.add(
        Table(
            "Measured slopes",
            "slope",
            rows,
            ("unit", "at zero", "over"),
            form="{:.3g}",
            note=f"{rounds} rounds. The line is straight over the range that was measured; beyond it is extrapolation.",
            is_drawn=False,
        )
    )
    section.save(options)
    return 0


# ------------------------------------------------------------------ federations


def federation(per_round: int, shape: tuple[int, int], rounds: int) -> Any:
    """Return a server of a linear model of that shape, whose clients have one batch each."""
    import torch

    from dovetail.federated.data.sources import GeneratedData
    from dovetail.servers import fedavg

    def samples(client_id: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(client_id)
        return torch.randn(8, shape[0], generator=generator), torch.randint(0, 8, (8,), generator=generator)

    data = GeneratedData(1000, samples, num_samples=lambda _: 8, model=lambda: torch.nn.Linear(*shape))
    return fedavg.Server(datasource=data, rounds=rounds, total_clients=1000, per_round=per_round, backend="sequential")


def client() -> Any:
    from dovetail.clients import simple
    from dovetail.trainers.composable import ComposableTrainer

    return simple.Client(trainer=ComposableTrainer(num_epochs=1, batch_size=8, learning_rate=0.1, verbose=False))


def clients(numbers: tuple[int, ...], rounds: int) -> Curve:
    import torch

    torch.set_num_threads(1)
    quietly()
    federation(numbers[0], SMALL, 1).run(client())

    def a_round(number: int) -> float:
        # The difference of two federations is the rounds that only one has: neither start nor end is in it.
        return (seconds(federation(number, SMALL, 3)) - seconds(federation(number, SMALL, 1))) / 2

    def seconds(server: Any) -> float:
        started = time.perf_counter()
        server.run(client())
        return time.perf_counter() - started

    found = in_turns(numbers, rounds, lambda number: 1e3 * a_round(number))
    return Curve("A round", "clients per round", "ms", numbers, found)


def cohorts(numbers: tuple[int, ...], rounds: int) -> Curve:
    def grown(number: int) -> float:
        command = [sys.executable, __file__, "--cohort", str(number)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])

    return Curve("Memory of a server", "clients per round", "MB", numbers, in_turns(numbers, rounds, grown))


def server_memory(per_round: int) -> float:
    """Return by how many megabytes this process grows in a round of clients with a model of one megabyte."""
    import torch

    torch.set_num_threads(1)
    quietly()
    # Whatever is imported and cached at first use is there afterwards.
    federation(2, LARGE, 1).run(client())
    before = peak()
    federation(per_round, LARGE, 1).run(client())
    return peak() - before


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**10 if sys.platform == "linux" else 2**20)


def quietly() -> None:
    import logging

    logging.disable()


# ------------------------------------------------------------------ two processes


def gradients(quick: bool) -> Curve:
    found = run_pair(__file__, "--rank-file", quick)
    return Curve("Two processes, beyond one", "MB of gradients", "ms per step", found["sizes"], found["times"])


def as_rank(target: Path, rounds: int, sizes: tuple[int, ...]) -> int:
    """Measure steps with and without the other process, while the other does the same."""
    import torch
    import torch.distributed as dist

    from dovetail import Epochs
    from dovetail.callbacks import Callback
    from dovetail.trainers import DDPTrainer, Trainer

    class Clock(Callback):
        def on_epoch_start(self, context: Any) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, context: Any, metrics: Any) -> None:
            self.seconds = time.perf_counter() - self.started

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = 10

    def side(megabytes: int, together: bool) -> Callable[[], float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2**15 * megabytes, 8)
        batches = [(torch.zeros(1, 2**15 * megabytes), torch.zeros(1, dtype=torch.long))] * steps
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer: Any = Trainer(model, "cpu", optimizer=optimizer, verbose=False)
        # In a group, `fit` gives each process its share of the batches.
        batches = batches * 2 if together else batches
        trainer = DDPTrainer(trainer) if together else trainer
        clock = Clock()
        trainer.context.callbacks.add(clock)

        def run() -> float:
            dist.barrier()
            trainer.fit(batches, max_length=Epochs(trainer.context.progress.epoch + 1))
            return float(clock.seconds) / steps

        return run

    sides = {size: (side(size, True), side(size, False)) for size in sizes}
    for both in sides.values():
        for run in both:
            run()

    def beyond(size: int) -> float:
        together, alone = sides[size]
        return 1e3 * (together() - alone())

    found = in_turns(sizes, rounds, beyond)
    if dist.get_rank() == 0:
        target.write_text(json.dumps({"sizes": sizes, "times": found}))
    dist.destroy_process_group()
    return 0


# ------------------------------------------------------------------ files


def checkpoints(sizes: tuple[int, ...], rounds: int) -> Curve:
    import torch

    from dovetail.checkpoint import save

    states = {size: {str(place): torch.randn(2**18) for place in range(size)} for size in sizes}
    with tempfile.TemporaryDirectory() as folder:

        def write(size: int) -> float:
            started = time.perf_counter()
            save(Path(folder, str(size)), states[size])
            return 1e3 * (time.perf_counter() - started)

        for size in sizes:
            write(size)
        return Curve("A checkpoint", "MB", "ms", sizes, in_turns(sizes, rounds, write))


def trials(numbers: tuple[int, ...], rounds: int) -> list[Curve]:
    from dovetail.search.schema import read_experiment
    from dovetail.search.space import Space
    from dovetail.search.store import Store

    config = {
        "entrypoint": "true",
        "hyperparameters": {"lr": {"type": "log", "minval": -4, "maxval": -1}},
        "searcher": {"name": "random", "metric": "loss", "max_trials": max(numbers)},
    }
    space = Space(config["hyperparameters"])
    distributions = space.distributions()
    (name,) = distributions

    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "code")
        code.mkdir()
        store = Store.open(Path(folder, "home"))

        def add(experiment_id: int) -> None:
            store.add_trial(experiment_id, {name: 0.01}, distributions, {"lr": 0.01})

        made = {number: store.create_experiment(read_experiment(config), "", code).id for number in numbers}
        for number, experiment_id in made.items():
            for _ in range(number):
                add(experiment_id)

        def write(number: int) -> float:
            started = time.perf_counter()
            for _ in range(5):
                add(made[number])
            return 1e3 * (time.perf_counter() - started) / 5

        def read(number: int) -> float:
            # As the command line does: from the file, not from what this process remembers.
            fresh = Store.open(Path(folder, "home"))
            started = time.perf_counter()
            fresh.experiment(made[number])
            return 1e3 * (time.perf_counter() - started)

        return [
            Curve("One more trial in the store", "trials", "ms", numbers, in_turns(numbers, rounds, write)),
            Curve("All trials from the store", "trials", "ms", numbers, in_turns(numbers, rounds, read)),
        ]


def in_turns(points: tuple[int, ...], rounds: int, measure: Callable[[int], float]) -> list[list[float]]:
    """Measure every point once per round, there and back, and return the samples by point."""
    found: dict[int, list[float]] = {point: [] for point in points}
    for number in range(rounds):
        for point in points if number % 2 == 0 else reversed(points):
            found[point].append(measure(point))
    return list(found.values())


if __name__ == "__main__":
    sys.exit(main())
