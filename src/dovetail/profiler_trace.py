"""Overlap of copies, collective operations and kernels in a chrome trace of torch's profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Overlap:
    """Times of a trace, in microseconds.

    Attributes:
        copies: The time of all copies from the host to the device.
        hidden_copies: The part of it in which a kernel ran.
        collectives: The time of all collective operations of the device.
        hidden_collectives: The part of it in which another kernel ran.
        num_kernels: The number of other kernels.
    """

    copies: float
    hidden_copies: float
    collectives: float
    hidden_collectives: float
    num_kernels: int


def read_trace(path: Path) -> list[Event]:
    """Return the events of a file that `torch.profiler.profile.export_chrome_trace` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    events: list[Event] = content["traceEvents"] if isinstance(content, dict) else content
    return events


def measure_overlap(events: Iterable[Event]) -> Overlap:
    """Return how long copies to the device and collective operations took, and how long kernels ran meanwhile.

    Args:
        events: The events of a chrome trace. Only complete events of a device count.

    Example:
        >>> kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 6}
        >>> copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 4, "dur": 4}
        >>> measure_overlap([kernel, copy]).hidden_copies
        2.0
    """
    events = list(events)
    copies = spans(events, _is_copy)
    collectives = spans(events, _is_collective)
    kernels = spans(events, lambda event: event.get("cat") == "kernel" and not _is_collective(event))
    return Overlap(
        copies=_total(copies),
        hidden_copies=overlapped(copies, kernels),
        collectives=_total(collectives),
        hidden_collectives=overlapped(collectives, kernels),
        num_kernels=len(kernels),
    )


def spans(events: Iterable[Event], is_chosen: Callable[[Event], bool]) -> list[tuple[float, float]]:
    """Return the starts and ends of chosen events that have a duration."""
    chosen = [event for event in events if event.get("ph") == "X" and is_chosen(event)]
    return [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in chosen]


def overlapped(copies: Sequence[tuple[float, float]], kernels: Sequence[tuple[float, float]]) -> float:
    """Return how long at least one kernel runs during the copies.

    Args:
        copies: Starts and ends of copies.
        kernels: Starts and ends of kernels, which may overlap.

    Example:
        >>> overlapped([(0.0, 4.0), (6.0, 8.0)], [(1.0, 3.0), (2.0, 3.5), (7.0, 9.0)])
        3.5
    """
    merged: list[list[float]] = []
    for start, end in sorted(kernels):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in merged)


def _total(times: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in times)


def _is_copy(event: Event) -> bool:
    # The name of CUDA and ROCm. On Intel's devices H is pinned memory, and M is any other memory of the host.
    return event.get("cat") == "gpu_memcpy" and any(it in event["name"] for it in ("HtoD", "H2D", "M2D"))


def _is_collective(event: Event) -> bool:
    # NCCL and RCCL, and Intel's oneCCL.
    return event.get("cat") == "kernel" and str(event["name"]).startswith(("nccl", "oneccl"))
