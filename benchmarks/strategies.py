"""What strategies add to an empty step, in microseconds: `train_step` alone, and whole steps of `fit`, in turns.

    python benchmarks/strategies.py

The model is one number, so that a step is hardly more than the loop. The bar is about whole steps. Their difference is
taken pair by pair, in CPU time; for scale, so is the difference of two trainers of the same class. What strategies add
to real steps is a row of `benchmarks/loop.py`.
"""

from __future__ import annotations

import sys
import time
import timeit
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.trainers import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.reuse import reset
from dovetail.units import Epochs
from report import Row, Section, Table, parser, verdict

__all__ = ["main"]

# Rounds, and those of a quick run.
ROUNDS, CALLS = (15, 3), (20_000, 500)
FITS, STEPS = (71, 7), (3000, 50)
BAR = 3.0


class Empty(nn.Module):
    """A model that costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight


def same(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def make_basic() -> Trainer:
    settings: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "verbose": False, "nonfinite": "ignore"}
    return Trainer(Empty(), "cpu", criterion=same, optim_function="SGD", learning_rate=0.1, **settings)


def make_composable() -> Trainer:
    settings: dict[str, Any] = {"device": "cpu", "verbose": False, "nonfinite": "ignore"}
    return ComposableTrainer(Empty(), loss_strategy=same, learning_rate=0.1, **settings)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    section = Section(
        "strategies",
        "Strategies",
        "`ComposableTrainer` against `basic.Trainer` on a model that is one number: what a strategy for every concern "
        "adds to a step, in microseconds of CPU time.",
        is_quick=options.quick,
    )
    batch = (torch.zeros(4, 2), torch.zeros(4))
    section.add(single_steps(batch, ROUNDS[options.quick], CALLS[options.quick]))
    section.add(whole_steps(batch, FITS[options.quick], STEPS[options.quick]))
    section.save(options)
    return 0


def single_steps(batch: Any, rounds: int, calls: int) -> Table:
    trainers = [make_basic(), make_composable()]
    for trainer in trainers:
        trainer.setup()
    times = [
        [timeit.timeit(lambda step=trainer.train_step: step(batch), number=calls) / calls * 1e6 for trainer in trainers]
        for _ in range(rounds)
    ]
    rows = [
        Row("basic.Trainer", [row[0] for row in times]),
        Row("ComposableTrainer", [row[1] for row in times]),
        Row("what strategies add", [row[1] - row[0] for row in times]),
    ]
    note = f"{rounds} rounds of {calls} calls."
    return Table("train_step alone", "µs", rows, form="{:.2f}", note=note, is_drawn=False)


def whole_steps(batch: Any, fits: int, steps: int) -> Table:
    batches = [batch] * steps
    sides = [make_basic(), make_composable(), make_basic()]
    for trainer in sides:
        trainer.fit(batches, max_length=Epochs(1))
    times: list[list[float]] = []
    for number in range(fits):
        found = [0.0] * len(sides)
        # The order changes, so that none is always the first.
        for index in ([0, 1, 2], [1, 2, 0], [2, 0, 1])[number % 3]:
            trainer = sides[index]
            reset(trainer)
            started = time.process_time()
            trainer.fit(batches, max_length=Epochs(1))
            found[index] = (time.process_time() - started) / steps * 1e6
        times.append(found)
    added = [row[1] - row[0] for row in times]
    rows = [
        Row("what strategies add", added, BAR, verdict=verdict(added, BAR)),
        Row("basic.Trainer, twice", [row[2] - row[0] for row in times], is_noise=True),
        Row("a whole step of basic.Trainer", [row[0] for row in times]),
    ]
    return Table("A whole step of fit", "µs", rows, form="{:.2f}", note=f"{fits} pairs of {steps} steps.")


if __name__ == "__main__":
    sys.exit(main())
