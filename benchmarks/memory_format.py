"""What `memory_format="channels_last"` gains on a small CNN: with and without it, in turns, and the ratio of each pair.

    python benchmarks/memory_format.py

The second ratio compares plain training with itself: the noise of this measurement.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

from dovetail.trainers import Trainer
from dovetail.units import Batches

ROUNDS, STEPS, BATCH = 25, 10, 64


def main() -> int:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {ROUNDS} rounds of {STEPS} steps")
    for depth in (1, 2):
        batches = _batches()
        _seconds("channels_last", batches, depth), _seconds(None, batches, depth)
        gains, noise = [], []
        for number in range(ROUNDS):
            plain = _seconds(None, batches, depth)
            # Whoever comes second in a round does so in every other one.
            if number % 2:
                again, laid_out = _seconds(None, batches, depth), _seconds("channels_last", batches, depth)
            else:
                laid_out, again = _seconds("channels_last", batches, depth), _seconds(None, batches, depth)
            gains.append(laid_out / plain)
            noise.append(again / plain)
        low, middle, high = statistics.quantiles(gains, n=4)
        print(
            f"CNN, {depth} convolution{'s' if depth > 1 else ''} a block: {middle:.2f}x the time of plain training "
            f"({low:.2f} to {high:.2f} in the middle half); plain again {statistics.median(noise):.2f}x"
        )
    return 0


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(BATCH, 1, 28, 28, generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def _model(depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in ((1, 16), (16, 32)):
        for place in range(depth):
            layers += [nn.Conv2d(channels if place == 0 else width, width, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def _seconds(memory_format: str | None, batches: list[tuple[torch.Tensor, torch.Tensor]], depth: int) -> float:
    """Seconds of training, without what comes before the first step."""
    torch.manual_seed(7)
    trainer = Trainer(
        _model(depth), "cpu", optim_function="SGD", memory_format=memory_format, nonfinite="ignore", verbose=False
    )
    trainer.fit(batches, max_length=Batches(1))
    began = time.perf_counter()
    trainer.fit(batches, max_length=Batches(1 + STEPS))
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
