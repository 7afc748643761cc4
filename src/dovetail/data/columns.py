"""Dataset of named columns in memory, whose batches are dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.utils.data import Dataset


class Columns(Dataset[dict[str, Tensor]]):
    """Samples whose fields are rows of named tensors.

    Args:
        columns: Tensors by name, with one row per sample.

    Example:
        >>> import torch
        >>> Columns({"x": torch.zeros(3, 2), "label": torch.arange(3)})[1]
        {'x': tensor([0., 0.]), 'label': tensor(1)}
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}
