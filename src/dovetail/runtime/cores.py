"""CPU cores, graphics cards and threads that this process may use."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # A container or `taskset` may allow fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


NO_CARDS = {"CUDA_VISIBLE_DEVICES": ""}
"""The environment variable that hides all graphics cards from a process."""


def graphics_cards() -> list[str]:
    """Return the names of the graphics cards that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [card for card in visible.split(",") if card and card != "-1"]
    with suppress(OSError):
        # NVIDIA's driver has one folder per card.
        return [str(number) for number, _ in enumerate(os.listdir("/proc/driver/nvidia/gpus"))]
    return []


def threads_per_process(num_processes: int) -> int:
    """Return the number of threads per process, so that all processes together do not use more threads than cores."""
    return max(1, num_cores() // num_processes)
