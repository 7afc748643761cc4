"""Weighted mean of client updates, and the global weights after adding it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dovetail.federated.messages import Update, WeightedSum, Weights

# Aggregates the differences of several updates into one.
Average = Callable[[Sequence[Update]], Weights]


def weighted_mean(updates: Sequence[Update]) -> Weights:
    """Return the mean of the updates' differences, each counted by its samples, in the order given."""
    return WeightedSum.of(updates).mean()


def moved(weights: Weights, delta: Weights, rate: float = 1.0) -> dict[str, Tensor]:
    """Return the weights plus `rate` times a difference; weights that it does not name stay, integers are rounded.

    Example:
        >>> moved({"w": torch.ones(2), "steps": torch.tensor(3)}, {"w": torch.ones(2), "steps": torch.tensor(1.6)})
        {'w': tensor([2., 2.]), 'steps': tensor(5)}
    """
    result = dict(weights)
    for name, change in delta.items():
        before = weights[name]
        change = change.to(before.device)
        # Without the multiplication, a rate of 1 gives the bits of a plain sum and needs no extra tensor.
        after = before + (change if rate == 1 else change * rate)
        if not (before.is_floating_point() or before.is_complex()):
            # Batch norm's `num_batches_tracked` is a whole number, but its mean over clients is not.
            after = torch.round(after)
        result[name] = after.to(before.dtype)
    return result
