"""Clipping of updates to a norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dovetail.errors import UnknownNameError, expect
from dovetail.federated.messages import Update, Weights
from dovetail.federated.postprocess.base import Postprocessor, Upload


def norm(weights: Weights) -> Tensor:
    """Return the L2 norm of all floating-point tensors, summed in float64 so that a bound holds exactly."""
    norms = [
        torch.linalg.vector_norm(value, dtype=torch.float64).cpu()
        for value in weights.values()
        if value.is_floating_point()
    ]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)


def clip(weights: Weights, max_norm: float) -> tuple[dict[str, Tensor], float]:
    """Return weights of at most this norm, and their norm before. Weights within the norm do not change.

    Example:
        >>> clip({"w": torch.tensor([3.0, 4.0])}, max_norm=1.0)
        ({'w': tensor([0.6000, 0.8000])}, 5.0)
    """
    length = float(norm(weights))
    # Without a multiplication, an update within the bound keeps its bits.
    if length <= max_norm:
        return dict(weights), length
    scale = max_norm / length
    return {name: value * scale if value.is_floating_point() else value for name, value in weights.items()}, length


@dataclass(frozen=True)
class NormClip(Postprocessor):
    """Clips updates to an L2 norm; the metric `update_norm` is the norm before. Whole numbers are ignored.

    Args:
        max_norm: The largest norm.
        per: Clip the norm of the whole `"update"`, or of every `"tensor"`.

    Example:
        >>> from dovetail.federated.messages import Task
        >>> update = Update(1, 1, 10, delta={"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])})
        >>> clipped = NormClip(6.5).encode(update, Upload(Task(1, 1, {}), seed=0, state={}))
        >>> clipped.delta, clipped.metrics
        ({'w': tensor([1.5000, 2.0000]), 'b': tensor([6.])}, {'update_norm': 13.0})
    """

    max_norm: float
    per: Literal["update", "tensor"] = "update"

    def __post_init__(self) -> None:
        expect(self.max_norm > 0, "max_norm", "a number above 0", self.max_norm)
        if self.per not in ("update", "tensor"):
            raise UnknownNameError("norm", str(self.per), ("update", "tensor"))

    def encode(self, update: Update, upload: Upload) -> Update:
        if self.per == "update":
            delta, length = clip(update.delta, self.max_norm)
        else:
            length = float(norm(update.delta))
            delta = {name: clip({name: value}, self.max_norm)[0][name] for name, value in update.delta.items()}
        return replace(update, delta=delta, metrics={**update.metrics, "update_norm": length})
