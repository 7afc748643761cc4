"""Memory alignment of batches: it changes the rounding of matrix products, so it must equal the alignment in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from torch import nn
from torch.utils.data import TensorDataset

from dovetail.data import DataLoader


def losses(loader: torch_data.DataLoader[Any], num_features: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(num_features, 10), nn.Tanh(), nn.Linear(10, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("num_features", [5, 10, 13, 33])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 33])
def test_losses_are_bit_identical_for_batches_of_any_size(num_features: int, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(100, num_features, generator=generator), torch.randint(0, 3, (100,), generator=generator)
    )
    theirs = torch_data.DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(1))
    ours = DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(1))
    assert losses(ours, num_features) == losses(theirs, num_features)
