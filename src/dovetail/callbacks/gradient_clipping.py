"""Callback that clips gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dovetail.callbacks.base import Callback, is_new_run
from dovetail.clipping import Clipping
from dovetail.distributed import whole

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dovetail.trainers.context import TrainingContext


class GradientClipping(Callback):
    """Clip gradients by their norm or by value before an optimizer steps.

    The gradients are complete (after accumulation) and unscaled (under mixed precision). The norm is computed over all
    gradients of the optimizer that is about to step: two optimizers are clipped separately.

    Args:
        max_norm: The largest norm; larger gradients are scaled down.
        max_value: The largest magnitude of an element. Exactly one of the two is given.
        norm_type: Which norm `max_norm` limits: 2.0 is the Euclidean one, `math.inf` the largest magnitude.
        log: Whether to record in the history, at the end of every epoch under the stage `gradients`, the mean size of
            the gradients before clipping (`size`: their norm, or their largest magnitude) and the share of steps in
            which they were clipped (`clipped`). For further optimizers the names end with their number: `size_1`,
            `clipped_1`.

    Example:
        >>> import torch
        >>> from dovetail.trainers.context import TrainingContext
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> GradientClipping(max_norm=1.0).on_gradients(TrainingContext(), torch.optim.SGD([weight]))
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """

    def __init__(
        self, max_norm: float | None = None, max_value: float | None = None, norm_type: float = 2.0, log: bool = False
    ) -> None:
        self.clipping = Clipping("GradientClipping", max_norm, max_value, norm_type)
        self.log = log
        # Sum of sizes, clipped steps and all steps of the current epoch, by the index of the optimizer.
        self._tallies: dict[int, Tensor] = {}

    def on_train_start(self, context: TrainingContext) -> None:
        """Reset the sums for a new run, because the previous run may have ended inside of an epoch."""
        if is_new_run(context):
            self._tallies.clear()

    def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
        context.run.batch.gradient_norm = size = self.clipping.apply(optimizer)
        if self.log:
            self._count(context, optimizer, size)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        record: dict[str, float] = {}
        for place, tally in sorted(self._tallies.items()):
            # Waits for the device, once per epoch.
            size, clipped, steps = tally.tolist()
            suffix = f"_{place}" if place else ""
            record[f"size{suffix}"], record[f"clipped{suffix}"] = size / steps, clipped / steps
        if record:
            progress = context.progress
            context.history.record(
                "gradients", record, epoch=progress.epoch, batches=progress.batches, updates=progress.updates
            )
        self._tallies.clear()

    def _count(self, context: TrainingContext, optimizer: Optimizer, size: Tensor) -> None:
        """Add the size of the gradients, and whether they were clipped, to the sums of the epoch."""
        # The norm of a sharded model is computed from all parts.
        size = whole(size)
        # Computed on the device: reading the norm at every step would wait for the device.
        place = next(index for index, known in enumerate(context.optimizers) if known is optimizer)
        entry = torch.stack([size, (size > self.clipping.limit).to(size.dtype), torch.ones_like(size)])
        # A tally from a checkpoint is on the host.
        known = self._tallies.get(place)
        self._tallies[place] = entry if known is None else entry + known.to(entry.device)

    def state_dict(self) -> dict[str, Any]:
        tallies = {str(place): tally for place, tally in self._tallies.items()}
        return {"tallies": tallies} if self.log else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tallies = {int(place): tally for place, tally in state["tallies"].items()}
