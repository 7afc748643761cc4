from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.utils.data as torch_data
from torch.utils.data import IterableDataset, SubsetRandomSampler, TensorDataset

from dovetail.data import DataLoader, as_loader, num_batches
from dovetail.data.slicing import rows_in_memory
from dovetail.errors import DataError


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Source:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def get(self) -> Any:
        return self.sampler


DATASET = TensorDataset(torch.arange(10))


def flat(loader: Any) -> list[int]:
    return [number for (batch,) in loader for number in batch.tolist()]


@pytest.mark.parametrize("data", [[torch.zeros(2)], torch_data.DataLoader(DATASET), iter([1]), range(3), {1, 2}])
def test_batched_sources_are_returned_unchanged(data: Any) -> None:
    assert as_loader(data, batch_size=2, shuffle=True) is data


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_, ">f4"])
def test_arrays_become_batches_of_tensors_with_their_values(dtype: Any) -> None:
    array = np.arange(6).reshape(3, 2).astype(dtype)
    (batch,) = as_loader((array, torch.arange(3)), batch_size=4)
    assert torch.equal(batch[0], torch.from_numpy(array.astype(array.dtype.newbyteorder("="))))
    assert batch[1].tolist() == [0, 1, 2]


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    array = np.arange(4)
    array.setflags(write=False)
    (batch,) = as_loader((array, array[::-1]), batch_size=4)
    assert [part.tolist() for part in batch] == [[0, 1, 2, 3], [3, 2, 1, 0]]


@pytest.mark.parametrize("data", [torch.arange(3), np.arange(3)])
def test_a_single_array_has_no_labels(data: Any) -> None:
    assert flat(as_loader(data, batch_size=2)) == [0, 1, 2]


def test_arrays_in_memory_need_no_workers() -> None:
    loader = as_loader((torch.arange(3),), batch_size=2, num_workers=2)
    assert isinstance(loader, DataLoader)
    assert loader.num_workers == 0


def test_a_dataset_source_applies_the_loader_options() -> None:
    loader = as_loader(DATASET, batch_size=4, shuffle=True, drop_last=True, seed=3)
    expected = DataLoader(DATASET, batch_size=4, shuffle=True, drop_last=True, seed=3)
    assert flat(loader) == flat(expected)


def test_a_stream_keeps_its_order() -> None:
    loader = as_loader(Stream(), batch_size=2, shuffle=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


INDICES = [7, 1, 3, 5]


@pytest.mark.parametrize(
    "sampler", [INDICES, tuple(INDICES), np.array(INDICES), torch.tensor(INDICES), Source(INDICES)]
)
def test_indices_select_samples_in_order(sampler: Any) -> None:
    assert flat(as_loader(DATASET, batch_size=3, sampler=sampler)) == INDICES


def test_indices_are_reshuffled_each_epoch_on_request() -> None:
    loader = as_loader(DATASET, batch_size=3, sampler=range(10), shuffle=True, seed=1)
    first, second = flat(loader), flat(loader)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(10))


def test_indices_keep_the_in_memory_path() -> None:
    loader = as_loader(DATASET, batch_size=3, sampler=INDICES, shuffle=True)
    assert isinstance(loader, DataLoader)
    assert rows_in_memory(loader) is not None


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, Source])
def test_a_torch_sampler_decides_the_order(wrap: Any) -> None:
    sampler = SubsetRandomSampler(INDICES, generator=torch.Generator().manual_seed(1))
    expected = list(SubsetRandomSampler(INDICES, generator=torch.Generator().manual_seed(1)))
    assert flat(as_loader(DATASET, batch_size=3, sampler=wrap(sampler), shuffle=True)) == expected


def test_a_source_without_sampler_uses_all_samples() -> None:
    assert flat(as_loader(DATASET, batch_size=3, sampler=Source(None))) == list(range(10))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("train.csv", "got 'train.csv'"),
        (None, "got None"),
        (3, "got 3"),
        ({}, "got an empty one"),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, "got 2 in 'x', 3 in 'y'"),
        ({"x": ["a", "b"]}, "the entry 'x' cannot be joined"),
        ((), "got none"),
        ((torch.zeros(2), torch.zeros(3)), "got 2 and 3"),
        ((torch.zeros(2), [1, 2]), "got a list"),
        (torch.tensor(1.0), r"got a Tensor of shape \(\)"),
        (np.array(["a", "b"]), "got a ndarray of shape"),
    ],
)
def test_unsupported_data_is_rejected(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_loader(data, batch_size=2)


@pytest.mark.parametrize("sampler", ["all", 3, [0.5], [[1]], {"a": 1}, Source("x")])
def test_unsupported_samplers_are_rejected(sampler: Any) -> None:
    with pytest.raises(DataError, match="sampler: expected indices"):
        as_loader(DATASET, batch_size=2, sampler=sampler)


@pytest.mark.parametrize("data", [Stream(), [torch.zeros(1)]])
def test_a_sampler_requires_a_dataset_with_indices(data: Any) -> None:
    with pytest.raises(DataError, match="sampler"):
        as_loader(data, batch_size=2, sampler=[0])


@pytest.mark.parametrize(
    ("loader", "count"),
    [
        ([1, 2], 2),
        (iter([1]), None),
        (DataLoader(DATASET, batch_size=3), 4),
        (DataLoader(DATASET, batch_size=3, num_replicas=3, rank=2), 1),
        (DataLoader(Stream(), batch_size=3), None),
        (torch_data.DataLoader(Stream(), batch_size=3), None),
    ],
)
def test_the_number_of_batches_is_returned_if_known(loader: Any, count: int | None) -> None:
    assert num_batches(loader) == count


class Indexed:
    """Samples by index, of no class that torch knows."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int]:
        return (index,)

    def __iter__(self) -> Iterator[tuple[int]]:
        return map(self.__getitem__, range(5))


def test_any_indexable_object_is_a_dataset() -> None:
    assert [batch.tolist() for (batch,) in as_loader(Indexed(), batch_size=2)] == [[0, 1], [2, 3], [4]]
    assert flat(as_loader(Indexed(), batch_size=2, sampler=[4, 1])) == [4, 1]


@pytest.mark.parametrize("index", [10, -11])
def test_an_index_beyond_the_data_is_rejected(index: int) -> None:
    with pytest.raises(DataError, match=f"sampler: expected indices of 10 samples, got {index}"):
        as_loader(DATASET, batch_size=2, sampler=[0, index])


# ------------------------------------------------------------------ tables


class Table:
    """A table of a library that is not known."""

    def to_numpy(self) -> Any:
        return np.zeros((2, 1))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> Any:
        return np.zeros(2)


def test_a_table_of_another_library_is_rejected_with_an_alternative() -> None:
    hint = "got a Table, whose to_numpy\\(\\) is an array"
    with pytest.raises(DataError, match=f"data: expected a Dataset, a DataFrame, .*, {hint}$"):
        as_loader(Table(), batch_size=2)
    with pytest.raises(DataError, match=f"data: expected tensors or numeric arrays .*, {hint};"):
        as_loader((Table(), torch.zeros(2)), batch_size=2)
    with pytest.raises(DataError, match=r"sampler: expected indices, .*, got a Series, whose to_numpy"):
        as_loader(DATASET, batch_size=2, sampler=pd.Series([1.0, 2.0]))


def test_an_array_like_dataset_is_treated_as_a_dataset() -> None:
    class Numbers(torch_data.Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

        def to_numpy(self) -> Any:
            return np.arange(3)

    assert [batch.tolist() for batch in as_loader(Numbers(), batch_size=2)] == [[0, 1], [2]]
