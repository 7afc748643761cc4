"""What checkpoints cost: ours beside `torch.save` with as much care for the disk, and beside `torch.load`.

    python benchmarks/checkpoints.py

Both write beside the final name, sync and rename. Ours also has a checksum of every byte, which loading compares. What
training waits for when the write is left to a thread is the last row.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dovetail.checkpoint import load, save
from dovetail.checkpoint.background import AsyncWriter
from report import Row, Section, Table, parser, ratios

__all__ = ["main"]

# Megabytes.
SIZES = (1, 16, 128)
ROUNDS = (15, 2)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    rounds = ROUNDS[options.quick]
    section = Section(
        "checkpoints",
        "Checkpoints",
        "A state of so many megabytes in tensors of one megabyte, written and read by `dovetail.checkpoint` and by "
        "`torch.save` and `torch.load(weights_only=True)`. Both write a temporary file, sync it and rename it; ours "
        "has checksums. In the background, a thread writes, and what counts is how long training waits.",
        is_quick=options.quick,
    )
    for size in SIZES[: 2 if options.quick else None]:
        section.add(measured(size, rounds))
    section.save(options)
    return 0


def measured(megabytes: int, rounds: int) -> Table:
    generator = torch.Generator().manual_seed(0)
    state = {str(place): torch.randn(2**18, generator=generator) for place in range(megabytes)}
    with tempfile.TemporaryDirectory() as name, AsyncWriter() as writer:
        folder = Path(name)

        def in_background() -> float:
            taken = seconds(lambda: writer.submit(folder / "background", state))
            writer.wait()
            return taken

        sides: dict[str, Callable[[], float]] = {
            "torch.save": lambda: seconds(lambda: with_torch(folder / "torch", state)),
            "torch.save, again": lambda: seconds(lambda: with_torch(folder / "again", state)),
            "dovetail, save": lambda: seconds(lambda: save(folder / "ours", state)),
            "dovetail, save in the background": in_background,
            "torch.load": lambda: seconds(lambda: torch.load(folder / "torch", weights_only=True)),
            "dovetail, load": lambda: seconds(lambda: load(folder / "ours")),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(1 + rounds):
            names = list(sides)
            # What is read must have been written: the order of the two kinds stays.
            for side in names if number % 2 == 0 else names[3::-1] + names[:3:-1]:
                taken = sides[side]()
                if number:
                    times[side].append(taken)
    rows = []
    for side, found in times.items():
        reference = times["torch.load" if side.endswith("load") else "torch.save"]
        cells = (f"{1e3 * sorted(found)[len(found) // 2]:.1f}",)
        rows.append(Row(side, ratios(found, reference), cells=cells, is_noise=side.endswith("again")))
    note = f"{rounds} rounds. Reading is compared with `torch.load`, all else with `torch.save`."
    return Table(f"{megabytes} MB", "time over torch's", rows, ("ms",), form="{:.2f}", note=note)


def with_torch(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Write with torch, wholly or not at all."""
    beside = path.with_suffix(".tmp")
    with open(beside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
