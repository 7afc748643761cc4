"""Data that needs no download."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.utils.data import TensorDataset

from dovetail.errors import DataError
from dovetail.extras import require

__all__ = ["digits"]


def digits(split: Sequence[float] = (0.7, 0.15, 0.15), seed: int = 0) -> tuple[TensorDataset, ...]:
    """Return scikit-learn's 1797 handwritten digits, cut into one dataset per part of `split`.

    Images are float32 in 0..1 of shape (1, 8, 8), labels are int64. Every part has the same mix of digits.

    Args:
        split: The shares of the parts, such as training, validation and test; they add up to at most 1.
        seed: Decides which images go where.

    Example:
        >>> train, valid, test = digits()
        >>> train.tensors[0].shape, len(valid), len(test)
        (torch.Size([1258, 1, 8, 8]), 270, 269)
    """
    if not split or min(split) < 0 or sum(split) > 1 + 1e-9:
        raise DataError(f"split: expected shares that add up to at most 1, got {tuple(split)}")
    bunch = require("sklearn.datasets", "datasets").load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)

    generator = torch.Generator().manual_seed(seed)
    bounds = [0.0, *itertools.accumulate(split)]
    parts: list[list[torch.Tensor]] = [[] for _ in split]
    for digit in range(10):
        members = (labels == digit).nonzero().squeeze(1)
        members = members[torch.randperm(len(members), generator=generator)]
        cuts = [round(bound * len(members)) for bound in bounds]
        for part, (first, last) in zip(parts, itertools.pairwise(cuts), strict=True):
            part.append(members[first:last])
    indices = [torch.cat(part).sort().values for part in parts]
    return tuple(TensorDataset(images[chosen], labels[chosen]) for chosen in indices)
