from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from dovetail.data.batches import batch_length, concat, map_tensors, slice_batch
from dovetail.errors import DataError

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Graph:
    nodes: Tensor
    name: str = "g"


def test_tensors_arrays_and_lists_with_one_entry_per_sample_are_sliced() -> None:
    batch = {"x": torch.arange(8).view(4, 2), "y": np.arange(4), "text": ["a", "b", "c", "d"]}
    part = slice_batch(batch, 1, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert part["y"].tolist() == [1, 2]
    assert part["text"] == ["b", "c"]


def test_values_that_are_not_per_sample_are_in_every_slice() -> None:
    weights = torch.ones(3)
    part = slice_batch(
        (torch.arange(4), {"weights": weights, "scale": torch.tensor(2.0), "name": "n", "no": None}), 0, 2
    )
    assert part[0].tolist() == [0, 1]
    assert part[1]["weights"] is weights
    assert (part[1]["scale"].item(), part[1]["name"], part[1]["no"]) == (2.0, "n", None)


def test_a_pair_of_two_samples_remains_a_pair() -> None:
    x, y = slice_batch([torch.tensor([1, 2]), torch.tensor([3, 4])], 1, 2)
    assert (x.tolist(), y.tolist()) == ([2], [4])


def test_a_list_of_samples_is_sliced_if_its_length_is_given() -> None:
    samples = [{"image": torch.zeros(3, 5)}, {"image": torch.zeros(3, 7)}, {"image": torch.zeros(3, 6)}, {}]
    assert slice_batch(samples, 1, 3, length=4) == samples[1:3]


def test_sliced_structures_keep_their_type() -> None:
    assert type(slice_batch(Pair(torch.arange(4), torch.arange(4)), 0, 2)) is Pair
    assert slice_batch(Graph(torch.arange(4)), 0, 2).nodes.tolist() == [0, 1]


@pytest.mark.parametrize("batch", [torch.tensor(1.0), {"scale": torch.tensor(1.0), "name": "a"}])
def test_a_batch_without_samples_is_rejected(batch: Any) -> None:
    with pytest.raises(DataError, match="cannot slice a batch of type"):
        slice_batch(batch, 0, 1, length=4)


def test_a_packed_batch_is_rejected() -> None:
    with pytest.raises(DataError, match="packed sequence"):
        slice_batch(pack_sequence([torch.zeros(3), torch.zeros(2)]), 0, 1)


@given(st.integers(2, 30), st.data())
def test_the_slices_of_a_batch_join_to_the_batch(length: int, data: st.DataObject) -> None:
    middle = data.draw(st.integers(0, length))
    batch = (torch.arange(length), {"names": [str(number) for number in range(length)]})
    parts = [slice_batch(batch, 0, middle), slice_batch(batch, middle, length)]
    joined = concat(parts)
    assert batch_length(joined) == length
    assert torch.equal(joined[0], batch[0])
    assert joined[1] == batch[1]


def test_map_tensors_returns_the_same_batch_if_nothing_changes() -> None:
    batch = (torch.zeros(2), {"name": "a"})
    assert map_tensors(lambda tensor: tensor, batch) is batch
