"""Loaders of torch over tensors in memory: the trainer slices them, with the batches and random numbers of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from torch.utils.data import Subset, TensorDataset

from dovetail.data.slicing import rows_in_memory
from dovetail.trainers.reading import Reader

ROWS = TensorDataset(torch.randn(37, 3), torch.arange(37))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch_data.DataLoader(ROWS, batch_size=8),
        lambda: torch_data.DataLoader(ROWS, batch_size=8, shuffle=True),
        lambda: torch_data.DataLoader(ROWS, batch_size=8, shuffle=True, drop_last=True, generator=seeded()),
        lambda: torch_data.DataLoader(Subset(ROWS, range(5, 30)), batch_size=8, shuffle=True),
        lambda: torch_data.DataLoader(
            ROWS, batch_sampler=torch_data.BatchSampler(torch_data.RandomSampler(ROWS), 8, drop_last=False)
        ),
    ],
)
def test_a_torch_loader_over_tensors_is_sliced_into_the_same_batches(make: Callable[[], Any]) -> None:
    """The global generator and the loader's have the same state after every batch, in two epochs."""

    def trace(loader: Any, batches: Any) -> Iterator[Any]:
        for epoch in range(2):
            for batch in batches(epoch):
                yield batch, torch.get_rng_state(), loader.generator and loader.generator.get_state()
            yield None, torch.get_rng_state(), loader.generator and loader.generator.get_state()

    torch.manual_seed(2)
    loader = make()
    expected = list(trace(loader, lambda epoch: loader))
    torch.manual_seed(2)
    loader, reader = make(), Reader()
    copy = reader.own(loader)
    assert rows_in_memory(copy) is not None
    found = list(trace(loader, lambda epoch: reader.batches(copy, epoch=epoch, start=0, is_running=False)))
    assert len(found) == len(expected) > 8
    for (batch, *states), (due, *due_states) in zip(found, expected, strict=True):
        assert (batch is None) == (due is None)
        assert batch is None or all(torch.equal(one, other) for one, other in zip(batch, due, strict=True))
        for state, due_state in zip(states, due_states, strict=True):
            assert state is due_state is None or torch.equal(state, due_state)


class Reversed(torch_data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(36, -1, -1))


@pytest.mark.parametrize(
    "loader",
    [
        torch_data.DataLoader(ROWS, batch_size=8, sampler=Reversed()),
        torch_data.DataLoader(ROWS, batch_size=8, collate_fn=list),
        torch_data.DataLoader(ROWS, batch_size=None),
    ],
)
def test_a_torch_loader_with_its_own_order_or_collation_is_read_by_torch(loader: Any) -> None:
    assert rows_in_memory(Reader().own(loader)) is None
