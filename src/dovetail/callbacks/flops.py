"""FLOPs of a training step, counted once, and the peak rate of common devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from dovetail.callbacks.base import Callback

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

# Dense bfloat16 or float16 operations per second from the data sheets, by whole words of the device's name. A longer
# name comes before its own beginning.
PEAK_FLOPS: Mapping[str, float] = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}


def peak_flops(device: torch.device) -> float:
    """Return the peak rate of a device in half precision; NaN if the device is not in `PEAK_FLOPS`.

    Example:
        >>> peak_flops(torch.device("cpu"))
        nan
    """
    if device.type != "cuda":
        return math.nan
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float:
    """Return the peak rate of a device by its name; NaN if it is unknown.

    Example:
        >>> peak_of("NVIDIA L4"), peak_of("NVIDIA L40")
        (121000000000000.0, nan)
    """
    # A variant of a product has its own rate.
    for part, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{re.escape(part)}\b(?! (Ti|SUPER|D|Laptop)\b)", name):
            return peak
    return math.nan


class StepFlops(Callback):
    """Counts the FLOPs of the first batch that it sees: forward, backward, and what else the step computes.

    Torch's `FlopCounterMode` counts matrix products, convolutions and attention, and changes no result. Each of them
    counts two operations per multiplication and addition.

    Attributes:
        per_sample: The FLOPs of the batch divided by its samples; NaN before the batch.
        changes_batch: False: batches may be copied to the device before `on_step_start`.
    """

    def __init__(self) -> None:
        self.per_sample = math.nan
        self.changes_batch = False
        self._mode: FlopCounterMode | None = None

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        if math.isnan(self.per_sample):
            self._mode = FlopCounterMode(display=False)
            # Without global hooks on modules, with which no step can be compiled: only the total is needed.
            self._mode.mod_tracker = cast(ModuleTracker, _OneModule())
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        total, num_samples = self.close(), context.run.batch.num_samples
        # A process without a batch computes along with the others. A compiled graph shows no operation.
        if total and num_samples:
            self.per_sample = total / num_samples

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        self.close()

    def close(self) -> int | None:
        """Stop counting, and return the FLOPs; None if nothing was being counted."""
        mode, self._mode = self._mode, None
        if mode is None:
            return None
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no types for it
        return mode.get_total_flops()


class _OneModule(AbstractContextManager[None]):
    """Replaces torch's tracker of the running modules, of which there is always one."""

    parents = frozenset({"Global"})

    def __exit__(self, *error: object) -> None:
        """Do nothing."""
