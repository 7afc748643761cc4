"""What strategies add to an empty step, in microseconds: `train_step` alone, and whole steps of `fit`, in turns.

    python benchmarks/strategies.py

The model is one number, so that a step is hardly more than the loop. The bar is about whole steps. Their difference is
given as the median of many pairs, in CPU time, with the interval that holds it with 95 % certainty; for scale, so is
the difference of two trainers of the same class. What strategies add to real steps is a row of `benchmarks/loop.py`.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import timeit
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.trainers import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.units import Epochs

ROUNDS, CALLS = 15, 20_000
FITS, STEPS = 101, 3000
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


def main() -> int:
    torch.set_num_threads(1)
    trainers = [make_basic(), make_composable()]
    batch = (torch.zeros(4, 2), torch.zeros(4))
    for trainer in trainers:
        trainer.setup()
    rounds = [
        [timeit.timeit(lambda step=trainer.train_step: step(batch), number=CALLS) / CALLS * 1e6 for trainer in trainers]
        for _ in range(ROUNDS)
    ]
    basic, composable = (statistics.median(times) for times in zip(*rounds, strict=True))
    added = statistics.median(after - before for before, after in rounds)
    print(f"train_step of basic.Trainer      {basic:6.2f} µs")
    print(f"train_step of ComposableTrainer  {composable:6.2f} µs")
    print(f"to train_step, strategies add {added:.2f} µs, median of {ROUNDS} rounds of {CALLS} calls")
    whole_steps(batch)
    return 0


def whole_steps(batch: Any) -> None:
    batches = [batch] * STEPS
    sides = [make_basic(), make_composable(), make_basic()]
    for trainer in sides:
        trainer.fit(batches, max_length=Epochs(1))
    times: list[list[float]] = []
    for number in range(FITS):
        found = [0.0] * len(sides)
        # The order changes, so that none is always the first.
        for index in ([0, 1, 2], [1, 2, 0], [2, 0, 1])[number % 3]:
            trainer = sides[index]
            trainer.reset()
            started = time.process_time()
            trainer.fit(batches, max_length=Epochs(1))
            found[index] = (time.process_time() - started) / STEPS * 1e6
        times.append(found)
    print(f"a whole step of basic.Trainer    {statistics.median(row[0] for row in times):6.2f} µs")
    middle, low, high = interval([row[1] - row[0] for row in times])
    verdict = "met" if high <= BAR else "missed" if low > BAR else "unclear"
    print(
        f"to a whole step, they add {middle:.2f} µs ({low:.2f} to {high:.2f}), median of {FITS} pairs of {STEPS} steps"
    )
    middle, low, high = interval([row[2] - row[0] for row in times])
    print(f"two trainers of the same class differ by {middle:.2f} µs ({low:.2f} to {high:.2f})")
    print(f"bar {BAR} µs for a whole step: {verdict}")


def interval(differences: list[float]) -> tuple[float, float, float]:
    """The median and, by order statistics, an interval that holds it with 95 % certainty."""
    ordered, middle = sorted(differences), len(differences) // 2
    reach = math.ceil(0.98 * math.sqrt(len(ordered)))
    return ordered[middle], ordered[middle - reach], ordered[middle + reach]


if __name__ == "__main__":
    sys.exit(main())
