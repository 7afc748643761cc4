from __future__ import annotations

import gc
import sys
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dovetail.data import batch_length, concat, split_batch, to_device
from dovetail.errors import DataError

CPU = torch.device("cpu")
META = torch.device("meta")
Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    name: str = "g"


def python_calls(function: Callable[[], object]) -> int:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    # Objects collected in the meantime may have finalizers in Python.
    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


leaves = st.one_of(
    st.none(), st.text(max_size=3), st.integers(), st.integers(1, 3).map(lambda size: torch.zeros(size, 2))
)
structures = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


def devices(batch: Any) -> set[str]:
    if isinstance(batch, Tensor):
        return {batch.device.type}
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return set().union(*map(devices, parts))


def shape(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, dict):
        return {key: shape(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch), [shape(part) for part in batch]
    return batch


@given(structures)
def test_a_batch_on_its_device_is_returned_unchanged(batch: Any) -> None:
    assert to_device(batch, CPU) is batch


@given(structures)
def test_moving_a_batch_moves_every_tensor_and_keeps_the_rest(batch: Any) -> None:
    moved = to_device(batch, META)
    assert devices(moved) <= {"meta"}
    assert shape(moved) == shape(batch)


def test_moving_a_batch_does_not_change_the_original() -> None:
    batch = {"x": [torch.zeros(2)]}
    to_device(batch, META)
    assert batch["x"][0].device == CPU


@pytest.mark.parametrize("kind", [tuple, list])
def test_moving_a_flat_batch_in_place_costs_one_python_call(kind: type) -> None:
    batch = kind([torch.zeros(2), torch.zeros(2)])
    # The lambda itself is the second call.
    assert python_calls(lambda: to_device(batch, CPU)) == 2


def test_a_device_may_be_named_by_a_string() -> None:
    assert to_device((torch.zeros(2), 1), "meta")[0].device == META  # type: ignore[arg-type]


def test_a_dataclass_is_moved_field_by_field() -> None:
    moved = to_device(Graph(torch.zeros(2), "a"), META)
    assert (type(moved), moved.nodes.device, moved.name) == (Graph, META, "a")


def test_a_packed_sequence_is_moved_as_a_whole() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(1)])
    moved = to_device([packed], META)[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META


class Molecule:
    """A batch of a class without a structure that is known."""

    def __init__(self, atoms: Tensor) -> None:
        self.atoms = atoms

    def to(self, device: torch.device) -> Molecule:
        return Molecule(self.atoms.to(device))


class MoleculeInPlace(Molecule):
    def to(self, device: torch.device, **options: Any) -> None:  # type: ignore[override]
        self.atoms = self.atoms.to(device, **options)


@pytest.mark.parametrize("kind", [Molecule, MoleculeInPlace])
def test_an_object_is_moved_by_its_own_method(kind: Any) -> None:
    moved = to_device({"molecules": kind(torch.zeros(2)), "names": ["a", None]}, META)
    assert type(moved["molecules"]) is kind
    assert moved["molecules"].atoms.device == META
    assert moved["names"] == ["a", None]
    assert to_device(kind(torch.zeros(2)), META).atoms.device == META


def test_a_module_and_a_class_in_a_batch_are_not_moved() -> None:
    module = nn.Linear(2, 2)
    batch = [module, Molecule, torch.float32, np.ones(2), np.float32(1)]
    assert to_device(batch, META) is batch
    assert module.weight.device == CPU


@pytest.mark.parametrize("kind", [OrderedDict, UserDict])
def test_a_moved_mapping_keeps_its_type(kind: Any) -> None:
    moved = to_device(kind(x=torch.zeros(1)), META)
    assert type(moved) is kind
    assert moved["x"].device == META


def test_a_read_only_mapping_becomes_a_dict() -> None:
    assert type(to_device(MappingProxyType({"x": torch.zeros(1)}), META)) is dict


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.zeros(4, 2), 4),
        ((torch.zeros(4, 2), torch.zeros(3)), 4),
        ([torch.tensor(1.0), torch.zeros(3)], 3),
        ({"scale": torch.tensor(1.0), "x": [None, torch.zeros(5)]}, 5),
        (np.zeros((6, 2)), 6),
        ((np.float32(1), np.zeros(6)), 6),
        (Point(None, torch.zeros(2)), 2),
        (Graph(torch.zeros(7)), 7),
        (["a", "b", "c"], 3),
        ((["a", "b"], [1, 2]), 2),
        ({"text": ("a", "b"), "mask": None}, 2),
        ((["a", "b", "c"], torch.zeros(2, 1)), 2),
        (torch.zeros(0, 3), 0),
        (pack_sequence([torch.zeros(3), torch.zeros(1)]), 2),
    ],
)
def test_the_batch_length_is_that_of_the_first_array_or_list(batch: Any, length: int) -> None:
    assert batch_length(batch) == length


@pytest.mark.parametrize("batch", [None, "text", 3, (), {}, torch.tensor(1.0), (torch.tensor(1.0), None), object()])
def test_a_batch_without_length_is_rejected(batch: Any) -> None:
    with pytest.raises(DataError, match="number of samples"):
        batch_length(batch)


def test_the_length_of_a_pair_costs_one_python_call() -> None:
    batch = [torch.zeros(2), torch.zeros(2)]
    assert python_calls(lambda: batch_length(batch)) == 2


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((1, 2), (1, 2)),
        ([1, 2], (1, 2)),
        ((1,), (1, None)),
        ((1, 2, 3), ((1, 2), 3)),
        ([1, 2, 3], ((1, 2), 3)),
        (Point(1, 2), (1, 2)),
        ({"image": 1, "label": 2}, (1, 2)),
        ({"ids": 1, "mask": 2, "labels": 3}, ({"ids": 1, "mask": 2}, 3)),
        ({"y": 1}, ({}, 1)),
        ({"target": 0, "labels": 1}, (0, 1)),
        ({"x": 1, "z": 2}, ({"x": 1, "z": 2}, None)),
        ("text", ("text", None)),
        ((), ((), None)),
    ],
)
def test_a_batch_splits_into_inputs_and_targets(batch: Any, expected: tuple[Any, Any]) -> None:
    assert split_batch(batch) == expected


def test_a_bare_tensor_is_inputs_only() -> None:
    batch = torch.zeros(2, 3)
    inputs, targets = split_batch(batch)
    assert inputs is batch
    assert targets is None


def test_a_packed_sequence_is_inputs_only() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(1)])
    inputs, targets = split_batch(packed)
    assert inputs is packed
    assert targets is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_concat_reverses_split(sizes: list[int]) -> None:
    whole = torch.arange(2 * sum(sizes)).view(-1, 2)
    parts = torch.split(whole, sizes)
    names = [str(row) for row in whole.tolist()]
    rest = iter(names)
    outputs = [{"pair": (part, part.numpy()), "names": [next(rest) for _ in part], "none": (None,)} for part in parts]
    joined = concat(outputs)
    assert torch.equal(joined["pair"][0], whole)
    assert np.array_equal(joined["pair"][1], whole.numpy())
    assert joined["names"] == names
    assert joined["none"] == (None,)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([], []),
        (["a", "b"], ["a", "b"]),
        ([1, 2.5], [1, 2.5]),
        ([["a"], [], ["b", "c"]], ["a", "b", "c"]),
        ([("a", ["x"]), ("b", ["y"])], (["a", "b"], ["x", "y"])),
        ([("a",), ["b"]], [("a",), ["b"]]),
    ],
)
def test_concat_collects_values_that_are_not_tensors(outputs: list[Any], expected: Any) -> None:
    assert concat(outputs) == expected


def test_concat_stacks_scalars() -> None:
    assert torch.equal(concat([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))


def test_concat_matches_mappings_by_key() -> None:
    joined = concat([{"a": ["1"], "b": ["2"]}, {"b": ["4"], "a": ["3"]}])
    assert joined == {"a": ["1", "3"], "b": ["2", "4"]}


@pytest.mark.parametrize("outputs", [[{"a": 1}, {"a": 2, "b": 3}], [{"a": 1, "b": 2}, {"a": 3}], [{"a": 1}, 2]])
def test_concat_keeps_all_entries_of_mappings_with_different_keys(outputs: list[Any]) -> None:
    assert concat(outputs) == outputs


def test_concat_keeps_named_tuples_and_dataclasses() -> None:
    joined = concat([Point(Graph(torch.zeros(1)), ["p"]), Point(Graph(torch.ones(2)), ["q"])])
    assert isinstance(joined, Point)
    assert torch.equal(joined.x.nodes, torch.tensor([0.0, 1.0, 1.0]))
    assert joined.x.name == ["g", "g"]
