"""What `memory_format="channels_last"` gains on a small CNN: with and without it, in turns, and the ratio of each pair.

    python benchmarks/memory_format.py

The second ratio compares plain training with itself: the noise of this measurement.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from dovetail.trainers import Trainer
from dovetail.units import Batches
from report import Row, Section, Table, parser, ratios

__all__ = ["main"]

# Rounds, and those of a quick run.
ROUNDS, STEPS, BATCH = (25, 3), 10, 64


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    rounds = ROUNDS[options.quick]
    section = Section(
        "memory_format",
        "Memory formats",
        '`Trainer(memory_format="channels_last")` against the same trainer without it, on a small CNN on 28×28 images '
        "with batches of 64.",
        is_quick=options.quick,
    )
    for depth in (1, 2):
        batches = _batches()
        _seconds("channels_last", batches, depth), _seconds(None, batches, depth)
        plain, again, laid_out = [], [], []
        for number in range(rounds):
            plain.append(_seconds(None, batches, depth))
            # Whoever comes second in a round does so in every other one.
            sides = [(again, None), (laid_out, "channels_last")]
            for times, memory_format in sides if number % 2 else reversed(sides):
                times.append(_seconds(memory_format, batches, depth))
        rows = [
            Row("dovetail, channels_last", ratios(laid_out, plain)),
            Row("plain, again", ratios(again, plain), is_noise=True),
        ]
        title = f"CNN with {depth} convolution{'s' if depth > 1 else ''} a block"
        section.add(Table(title, "time over plain", rows, note=f"{rounds} rounds of {STEPS} steps."))
    section.save(options)
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
