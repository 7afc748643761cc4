"""How far from each other two ways of computing the same are, where they are not equal bit for bit.

    python benchmarks/rounding.py

Compiled steps sum in another order than eager ones, and a fleet of clients in another order than one client after the
other. Nothing is timed here. A step is compared from the state that the compiled run had before it; whole runs and
rounds go their own ways from the same beginning.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dovetail.callbacks import Callback
from dovetail.clients import simple
from dovetail.data.models import cnn, logistic, mlp
from dovetail.federated.config import ClientsConfig
from dovetail.federated.data.sources import GeneratedData
from dovetail.servers import fedavg
from dovetail.trainers import CompiledTrainer, Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy, ShuffleDataLoaderStrategy
from dovetail.units import Epochs
from report import Row, Section, Table, parser

__all__ = ["main"]

SEED, WIDTH, BATCH = 7, 10, 32
# Steps that are compared one by one, those of a long run, and rounds of a federation; and those of a quick run.
STEPS, LONG, ROUNDS = (200, 5), (2000, 50), (10, 2)

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.05),
    "SGD with momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda model: Adam(model.parameters(), lr=1e-3),
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: mlp(WIDTH, WIDTH, (WIDTH,)), (WIDTH,)),
    "CNN": (lambda: cnn(1, 8, WIDTH), (1, 8, 8)),
}
FLEETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "logistic regression": (lambda: logistic(6, 3), (6,)),
    "MLP": (lambda: mlp(6, 3, hidden=(8,)), (6,)),
    "CNN": (lambda: cnn(1, 8, 3), (1, 8, 8)),
}


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    section = Section(
        "rounding",
        "Rounding",
        "How far compiled steps are from eager ones, and clients that train as a fleet from clients that train one "
        "after the other. Everything else is equal bit for bit, and the tests say so.",
        is_quick=options.quick,
    )
    section.add(single_steps(STEPS[options.quick]))
    section.add(long_runs(LONG[options.quick]))
    section.add(fleets(ROUNDS[options.quick]))
    section.save(options)
    return 0


# ------------------------------------------------------------------ compiled steps


class _Watching(Callback):
    """Keeps the state before every step, and the weights and the loss behind it."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, float]] = []

    def on_step_start(self, context: Any, batch: Any) -> None:
        self.before = copy.deepcopy((context.model.state_dict(), context.optimizers[0].state_dict()))

    def on_step_end(self, context: Any, output: Mapping[str, Any]) -> None:
        self.steps.append((*self.before, copy.deepcopy(context.model.state_dict()), float(output["loss"])))


def single_steps(num_steps: int) -> Table:
    """Compare every compiled step with an eager one from the same state."""
    criterion, rows = nn.CrossEntropyLoss(), []
    for name, (make, shape) in MODELS.items():
        batches = made_batches(shape, num_steps, torch.float32)
        for title, make_optimizer in OPTIMIZERS.items():
            torch.manual_seed(SEED)
            model, watching = make(), _Watching()
            trained(model, make_optimizer(model), batches, True, [watching])
            eager, stepped = copy.deepcopy(model), []
            for (inputs, targets), (weights, state, after, loss) in zip(batches, watching.steps, strict=True):
                eager.load_state_dict(weights)
                optimizer = make_optimizer(eager)
                optimizer.load_state_dict(state)
                optimizer.zero_grad()
                found = criterion(eager(inputs), targets)
                found.backward()
                optimizer.step()
                with torch.no_grad():
                    ends = [float(criterion(eager(inputs), targets))]
                    eager.load_state_dict(after)
                    ends.append(float(criterion(eager(inputs), targets)))
                stepped.append(max(abs(float(found.detach()) - loss), abs(ends[0] - ends[1])))
            rows.append(judged(f"{name}, {title}", [max(stepped)], 1e-6))
    return Table(
        "A compiled step: its loss, and the loss of the weights behind it, against an eager step from the same state",
        "farthest apart",
        rows,
        form="{:.1e}",
        note=f"{num_steps} steps each, in float32.",
        is_drawn=False,
    )


def long_runs(num_steps: int) -> Table:
    """Compare the losses of whole runs, which go their own ways."""
    rows = []
    for dtype in (torch.float32, torch.float64):
        for order in ("in a list", "shuffled", "shuffled otherwise"):
            batches = made_batches((WIDTH,), num_steps, dtype, {"in a list": 0, "shuffled": 1}.get(order, 2))
            losses = []
            for is_compiled in (False, True):
                torch.manual_seed(SEED)
                model = mlp(WIDTH, WIDTH, (WIDTH,)).to(dtype)
                losses.append(trained(model, OPTIMIZERS["SGD"](model), batches, is_compiled, []))
            gaps = [abs(mine - its) for mine, its in zip(*losses, strict=True)]
            rows.append(Row(f"{str(dtype).removeprefix('torch.')}, batches {order}", [max(gaps)]))
    return Table(
        f"Whole runs of {num_steps:,} steps, compiled against eager (MLP of width {WIDTH}, SGD)",
        "losses farthest apart",
        rows,
        form="{:.1e}",
        note="A ReLU that is almost zero may fall to the other side, as in two eager runs on different machines.",
        is_drawn=False,
    )


def trained(
    model: nn.Module, optimizer: Optimizer, batches: list[Any], is_compiled: bool, callbacks: list[Callback]
) -> list[float]:
    """Train for one epoch, and return the loss of every step."""
    trainer: Trainer = Trainer(
        model, "cpu", optimizer=optimizer, criterion=nn.CrossEntropyLoss(), callbacks=callbacks, verbose=False
    )
    if is_compiled:
        trainer = CompiledTrainer(trainer)
    trainer.fit(batches, max_length=Epochs(1))
    return list(trainer.history.losses)


def made_batches(
    shape: tuple[int, ...], number: int, dtype: torch.dtype, order: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Return batches of random numbers, in one order or another."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(number * BATCH, *shape, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(WIDTH, (number * BATCH,), generator=generator)
    if order:
        rows = torch.randperm(len(inputs), generator=generator.manual_seed(order))
        inputs, targets = inputs[rows], targets[rows]
    return list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))


# ------------------------------------------------------------------ fleets


def fleets(num_rounds: int) -> Table:
    """Compare the weights of a federation whose clients train as one with those of one that takes them in turn."""
    rows = []
    for name, (make, shape) in FLEETS.items():
        for dtype, bar in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
            fleet, alone = (
                federated(backend, make, shape, dtype, num_rounds) for backend in ("vectorized", "sequential")
            )
            gap = max(float((fleet[key] - value).abs().max()) for key, value in alone.items())
            rows.append(judged(f"{name}, {str(dtype).removeprefix('torch.')}", [gap], bar))
    return Table(
        f"Weights after {num_rounds} rounds, `vectorized` against `sequential`",
        "farthest apart",
        rows,
        form="{:.1e}",
        note="12 clients of 3 to 31 samples, 5 in a round, 2 epochs, batch 8, SGD with momentum.",
        is_drawn=False,
    )


def federated(
    backend: str, make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, num_rounds: int
) -> Mapping[str, Tensor]:
    """Return the weights of a federation after its last round."""

    def samples(client_id: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(client_id)
        inputs = torch.randn(3 + 5 * client_id % 29, *shape, generator=generator, dtype=torch.float64)
        return inputs.to(dtype), (inputs.flatten(1).sum(dim=1) * 3 % 3).long()

    trainer = ComposableTrainer(
        optimizer_strategy=SGDOptimizerStrategy(lr=0.05, momentum=0.9),
        data_loader_strategy=ShuffleDataLoaderStrategy(),
        num_epochs=2,
        batch_size=8,
        verbose=False,
    )
    server = fedavg.Server(
        model=lambda: make().to(dtype),
        datasource=GeneratedData(12, samples),
        trainer=trainer,
        backend=backend,
        rounds=num_rounds,
        clients=ClientsConfig(total_clients=12, per_round=5),
    )
    server.run(simple.Client(trainer=trainer))
    weights: Mapping[str, Tensor] = server.weights
    return weights


def judged(name: str, samples: list[float], bar: float) -> Row:
    """Return a row of which there is nothing unclear: the same machine gives the same numbers."""
    return Row(name, samples, bar, verdict="met" if max(samples) <= bar else "missed")


if __name__ == "__main__":
    sys.exit(main())
