"""What strategies add to an empty step, in microseconds: `train_step` of both trainers, called in turns.

    python benchmarks/strategies.py

What they add to real steps is a row of `benchmarks/loop.py`.
"""

from __future__ import annotations

import statistics
import sys
import timeit
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.trainers import Trainer
from dovetail.trainers.composable import ComposableTrainer

ROUNDS, CALLS = 15, 20_000
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
    print(f"strategies add     {added:6.2f} µs (bar: {BAR}), median of {ROUNDS} rounds of {CALLS} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
