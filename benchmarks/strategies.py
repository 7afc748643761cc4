"""What strategies add to an empty step, in microseconds: `train_step` alone, and whole steps of `fit`, in turns.

The bar is about whole steps. Those are noisier by far, so their spread is printed, and what it leaves open is said.

    python benchmarks/strategies.py

What they add to real steps is a row of `benchmarks/loop.py`.
"""

from __future__ import annotations

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
FITS, STEPS = 60, 1000
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


def main() -> int:
    settings: dict[str, Any] = {"verbose": False, "nonfinite": "ignore"}
    trainers: list[Trainer] = [
        Trainer(Empty(), "cpu", criterion=same, optim_function="SGD", **settings),
        ComposableTrainer(Empty(), loss_strategy=same, device="cpu", **settings),
    ]
    batch = (torch.zeros(4, 2), torch.zeros(4))
    for trainer in trainers:
        trainer.setup()
    rounds = [
        [timeit.timeit(lambda step=trainer.train_step: step(batch), number=CALLS) / CALLS * 1e6 for trainer in trainers]
        for _ in range(ROUNDS)
    ]
    basic, composable = (statistics.median(times) for times in zip(*rounds, strict=True))
    added = statistics.median(after - before for before, after in rounds)
    print(f"basic.Trainer      {basic:6.2f} µs")
    print(f"ComposableTrainer  {composable:6.2f} µs")
    print(f"to train_step, strategies add {added:.2f} µs, median of {ROUNDS} rounds of {CALLS} calls")
    differences = [_whole_step(ComposableTrainer) - _whole_step(Trainer) for _ in range(FITS)]
    low, middle, high = statistics.quantiles(differences, n=4)
    verdict = "met" if high <= BAR else "missed" if low > BAR else "unclear"
    print(f"to a whole step, they add {middle:.2f} µs ({low:.2f} to {high:.2f} in the middle half of {FITS} pairs)")
    print(f"bar {BAR} µs for a whole step: {verdict}")
    return 0


def _whole_step(kind: type[Trainer]) -> float:
    """Microseconds of CPU time per step of a fit over batches in a list."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    settings: dict[str, Any] = {"learning_rate": 0.1, "device": "cpu", "verbose": False, "nonfinite": "ignore"}
    if kind is Trainer:
        settings |= {"optim_function": "SGD", "momentum": 0.0, "weight_decay": 0.0}
    trainer = kind(model, **settings)
    batches = [(torch.ones(32, 10), torch.zeros(32, dtype=torch.long))] * STEPS
    started = time.process_time()
    trainer.fit(batches, max_length=Epochs(1))
    return (time.process_time() - started) / STEPS * 1e6


if __name__ == "__main__":
    sys.exit(main())
