"""What goes into a checkpoint comes out of it: same values, same types, same bits."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.checkpoint import load, save
from dovetail.checkpoint.encoding import decode, encode
from dovetail.errors import CheckpointError


@pytest.fixture
def round_trip(tmp_path: Path) -> Any:
    def save_and_load(value: Any) -> Any:
        return load(save(tmp_path / "checkpoint", {"value": value}))["value"]

    return save_and_load


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(1 << 63),
        (1 << 64) - 1,
        1 << 64,
        0.1,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        "",
        "ünïcode \x00 \ud800",
        b"\x00\xff",
        [],
        (),
        {},
        [1, [2, (3, [4])]],
        ((), [()], {"a": ()}),
        {1: "int", "1": "str", 2.5: "float", None: "none", (1, "x"): "tuple", b"k": "bytes"},
        {"$tuple": [1], "$": 2},
        {"a.b": 1, "a": {"b": 2}},
        Counter({3: 1, 7: 2}),
        random.Random(7).getstate(),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_plain_values_round_trip_with_equal_type(round_trip: Any, value: Any) -> None:
    loaded = round_trip(value)
    assert loaded == value
    assert repr(loaded) == repr(value)


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.binary(), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=_plain)
def test_any_nesting_of_plain_values_round_trips(round_trip: Any, value: Any) -> None:
    assert repr(round_trip(value)) == repr(value)


def test_huge_integers_round_trip(round_trip: Any) -> None:
    assert round_trip(-(7**10_000)) == -(7**10_000)


def test_negative_zero_keeps_its_sign(round_trip: Any) -> None:
    assert math.copysign(1, round_trip(-0.0)) == -1


def test_nan_round_trips(round_trip: Any) -> None:
    assert math.isnan(round_trip(math.nan))


def test_subclasses_of_dict_are_loaded_as_dict(round_trip: Any) -> None:
    assert type(round_trip(OrderedDict(b=1, a=2))) is dict


def test_the_order_of_a_dict_is_kept(round_trip: Any) -> None:
    assert list(round_trip({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]


_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def _bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)], ids=str)
def test_tensors_round_trip_bit_for_bit(round_trip: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    loaded = round_trip(tensor)
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert _bits(loaded) == _bits(tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4).T,
        lambda: torch.arange(12.0)[::3],
        lambda: torch.arange(12.0)[5:9],
        lambda: torch.ones(1).expand(4, 3),
        lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
        lambda: torch.randn(4, dtype=torch.complex128).conj(),
        lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.arange(600_000.0).reshape(2, -1, 3).transpose(0, 2),
        lambda: torch.arange(600_000.0).reshape(-1, 2).T,
        lambda: torch.arange(1_200_000.0).reshape(1, 600_000, 2).transpose(1, 2),
    ],
    ids=[
        "transposed",
        "strided",
        "slice",
        "expanded",
        "permuted",
        "conj64",
        "conj128",
        "negative",
        "parameter",
        "large",
        "large-rows",
        "large-deep",
    ],
)
def test_tensor_views_are_loaded_as_their_values(round_trip: Any, make: Any) -> None:
    tensor = make()
    loaded = round_trip(tensor)
    assert torch.equal(loaded, tensor)
    assert not loaded.requires_grad


def test_the_payload_of_a_nan_is_kept(round_trip: Any) -> None:
    tensor = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert torch.equal(round_trip(tensor).view(torch.int32), tensor.view(torch.int32))


def test_a_view_does_not_store_the_memory_behind_it(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"row": torch.zeros(1000, 1000)[3]})
    assert (path / "tensors.safetensors").stat().st_size < 5000


def test_tied_weights_are_stored_once_and_share_memory_after_loading(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    path = save(tmp_path / "checkpoint", {"encoder": weight, "decoder": {"weight": weight.view_as(weight)}})
    loaded = load(path)
    assert (path / "tensors.safetensors").stat().st_size < 4500
    assert torch.equal(loaded["encoder"], weight)
    assert loaded["encoder"].data_ptr() == loaded["decoder"]["weight"].data_ptr()


def test_different_views_of_one_memory_remain_different(round_trip: Any) -> None:
    memory = torch.arange(6.0)
    loaded = round_trip([memory, memory[:3], memory.view(2, 3), memory.view(torch.int32)])
    assert [tuple(item.shape) for item in loaded] == [(6,), (3,), (2, 3), (6,)]
    assert torch.equal(loaded[3].view(torch.float32), memory)


def test_loaded_tensors_own_their_memory(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"a": torch.zeros(3), "b": torch.zeros(3)})
    load(path)["a"].add_(1)
    assert torch.equal(load(path)["a"], torch.zeros(3))


def test_tensor_names_that_collide_are_kept_apart(round_trip: Any) -> None:
    loaded = round_trip({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.ones(2), "1": torch.zeros(2)})
    assert torch.equal(loaded["a.b"], torch.ones(1))
    assert torch.equal(loaded["a"]["b"], torch.zeros(1))
    assert torch.equal(loaded[1], torch.ones(2))
    assert torch.equal(loaded["1"], torch.zeros(2))


def test_a_tensor_may_have_a_reserved_name_of_the_format(tmp_path: Path) -> None:
    state = load(save(tmp_path / "checkpoint", {"__metadata__": torch.ones(2)}))
    assert torch.equal(state["__metadata__"], torch.ones(2))


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint16",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        ">f4",
        ">i8",
        ">c16",
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_numpy_arrays_are_loaded_as_arrays(round_trip: Any, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    loaded = round_trip(array)
    assert isinstance(loaded, np.ndarray)
    assert loaded.dtype == array.dtype.newbyteorder("=")
    assert loaded.shape == array.shape
    assert np.array_equal(loaded, array)
    assert loaded.flags.writeable


def test_reversed_and_read_only_arrays_are_stored(round_trip: Any) -> None:
    array = np.arange(5.0)[::-1]
    array.flags.writeable = False
    assert np.array_equal(round_trip(array), [4, 3, 2, 1, 0])


@pytest.mark.parametrize(
    "scalar",
    [
        np.float64(0.1),
        np.float32(math.inf),
        np.float16(1.5),
        np.int64(-3),
        np.uint8(255),
        np.bool_(True),
        np.complex128(1 + 2j),
        np.complex64(-1j),
    ],
    ids=repr,
)
def test_numpy_scalars_keep_their_type(round_trip: Any, scalar: Any) -> None:
    loaded = round_trip(scalar)
    assert type(loaded) is type(scalar)
    assert loaded.tobytes() == scalar.tobytes()


def test_numpy_generators_resume_from_a_checkpoint(round_trip: Any) -> None:
    generator = np.random.default_rng(3)
    state = round_trip(generator.bit_generator.state)
    expected = generator.random(5)
    generator.bit_generator.state = state
    assert np.array_equal(generator.random(5), expected)


def test_python_random_resumes_from_a_checkpoint(round_trip: Any) -> None:
    source = random.Random(3)
    state = round_trip(source.getstate())
    expected = [source.random() for _ in range(5)]
    source.setstate(state)
    assert [source.random() for _ in range(5)] == expected


def test_optimizers_and_schedulers_resume_from_a_checkpoint(round_trip: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = round_trip((optimizer.state_dict(), scheduler.state_dict()))
    twin = torch.optim.Adam(model.parameters())
    twin.load_state_dict(state[0])
    for before, after in zip(optimizer.state.values(), twin.state.values(), strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert state[1] == scheduler.state_dict()


def _cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.eye(2).to_sparse(), r"value\.deep: cannot store a tensor of layout torch.sparse_coo"),
        (torch.ones(1, device="meta"), r"value\.deep: cannot store a tensor on the meta device"),
        (torch.empty(2, dtype=torch.bits8), r"value\.deep: cannot store a tensor of torch\.bits8"),
        (object(), r"value\.deep: cannot store a builtins\.object \(accepted: dict, list"),
        ({1, 2}, r"value\.deep: cannot store a builtins\.set"),
        (1 + 2j, r"value\.deep: cannot store a builtins\.complex"),
        (np.array([None]), r"value\.deep: cannot store a numpy\.object"),
        (np.array(["a"]), r"value\.deep: cannot store a numpy\.str"),
        (np.datetime64("2020-01-01"), r"value\.deep: cannot store a numpy\.datetime64"),
        (np.ma.array([1]), r"value\.deep: cannot store a numpy\.ma"),
        ({torch.ones(1): 1}, r"value\.deep: cannot store a dict whose keys are tensors"),
        (_cycle(), "nested deeper than 64 levels"),
    ],
    ids=["sparse", "meta", "dtype", "object", "set", "complex", "objects", "strings", "date", "masked", "key", "cycle"],
)
def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path, value: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        save(tmp_path / "checkpoint", {"value": {"deep": value}})
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_not_a_dict_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="state: expected a dict, got list"):
        save(tmp_path / "checkpoint", [1])  # type: ignore[call-overload] # the mistake under test


_PRIME = (1 << 61) - 1
_COLLIDING: dict[str, list[Any]] = {
    "whole numbers": [number * _PRIME for number in range(60_000)],
    "tuples": [((number * _PRIME, "a"),) for number in range(2_000)],
    "complex numbers": [np.complex128(complex(-1000003 * number, number)) for number in range(2_000)],
}


@pytest.mark.parametrize("kind", _COLLIDING)
def test_a_file_whose_keys_share_one_hash_is_rejected(kind: str) -> None:
    keys = _COLLIDING[kind]
    assert len({hash(key) for key in keys}) == 1
    tree = {"$dict": [[key, 0] for key in json.loads(encode({"keys": keys}).text)["keys"]]}
    with pytest.raises(CheckpointError, match=r"state\.json: malformed value \(more than 16 keys share one hash\)"):
        decode(tree, "state.json")


def test_a_dict_whose_keys_share_one_hash_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="value: cannot store a dict in which more than 16 keys share one hash"):
        save(tmp_path / "checkpoint", {"value": dict.fromkeys(_COLLIDING["tuples"][:17], 0)})


def test_large_dicts_with_integer_keys_round_trip(round_trip: Any) -> None:
    for value in (
        {number: number for number in range(20_000)},
        {number << 40: 0 for number in range(20_000)},
        {(number, -number): 0 for number in range(20_000)},
        {number / 3: 0 for number in range(20_000)},
        dict.fromkeys(_COLLIDING["whole numbers"][:16]),
    ):
        assert round_trip(value) == value
