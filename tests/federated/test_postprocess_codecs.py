"""Codecs: precision, round trips, and malformed bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import ConfigError, DataError
from dovetail.federated.messages import Task, Update
from dovetail.federated.postprocess import QSGD, Bfloat16, Codec, Quantization, TopK, Upload, Zstd

SHAPES = st.lists(st.integers(1, 6), max_size=3)
SEEDS = st.integers(0, 2**31)


def normal(shape: list[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def round_trip(codec: Codec, value: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return codec.unpack(codec.pack({"w": value}, torch.Generator().manual_seed(seed)))["w"]


# ------------------------------------------------------------------ quantization


@given(shape=SHAPES, seed=SEEDS, bits=st.sampled_from([4, 8]))
@settings(deadline=None)
def test_nearest_rounding_errs_by_at_most_half_a_level(shape: list[int], seed: int, bits: Any) -> None:
    value = normal(shape, seed, torch.float64)
    level = (value.max() - value.min()) / (2**bits - 1)
    error = (round_trip(Quantization(bits, stochastic=False), value) - value).abs().max()
    assert error <= level * 0.5 + 1e-12


@given(shape=SHAPES, seed=SEEDS, bits=st.sampled_from([4, 8]))
@settings(deadline=None)
def test_stochastic_rounding_errs_by_less_than_a_level(shape: list[int], seed: int, bits: Any) -> None:
    value = normal(shape, seed, torch.float64)
    level = (value.max() - value.min()) / (2**bits - 1)
    error = (round_trip(Quantization(bits), value, seed) - value).abs().max()
    assert error <= level + 1e-12


@pytest.mark.parametrize("codec", [Quantization(8), Quantization(4), QSGD(64), QSGD(4)], ids=repr)
def test_stochastic_rounding_is_unbiased(codec: Codec) -> None:
    value, repeats = normal([30], 0, torch.float64), 1000
    # Many tensors at once are many draws from one generator.
    packed = codec.pack({str(n): value for n in range(repeats)}, torch.Generator().manual_seed(1))
    drawn = torch.stack(list(codec.unpack(packed).values()))
    deviation = drawn.std(dim=0) / math.sqrt(repeats)
    assert deviation.max() > 0
    # Five standard errors of each of 30 numbers: wrong once in 60,000 seeds, and this seed is fixed.
    assert ((drawn.mean(dim=0) - value).abs() <= 5 * deviation + 1e-12).all()


@pytest.mark.parametrize("codec", [Quantization(8), Quantization(4), QSGD()], ids=repr)
def test_a_constant_tensor_is_unchanged(codec: Codec) -> None:
    assert torch.equal(round_trip(codec, torch.zeros(5)), torch.zeros(5))
    if isinstance(codec, Quantization):
        assert torch.equal(round_trip(codec, torch.full((5,), -3.7)), torch.full((5,), -3.7))


def test_the_ends_of_the_range_are_quantized_exactly() -> None:
    value = torch.tensor([-2.5, 0.1, 7.25])
    back = round_trip(Quantization(4), value)
    assert back[0] == -2.5
    assert back[2] == 7.25


def test_four_bits_take_half_a_byte() -> None:
    packed = Quantization(4).pack({"w": torch.randn(1001)}, torch.Generator())
    assert packed["w/levels"].nbytes == 501


def test_quantization_has_a_known_answer() -> None:
    packed = Quantization(8, stochastic=False).pack({"w": torch.tensor([0.0, 1.0, 2.55])}, torch.Generator())
    assert packed["w/levels"].tolist() == [0, 100, 255]


@given(seed=SEEDS, levels=st.integers(1, 127))
@settings(deadline=None)
def test_qsgd_errs_by_less_than_a_level(seed: int, levels: int) -> None:
    value = normal([50], seed)
    error = (round_trip(QSGD(levels), value, seed) - value).abs().max()
    assert error <= value.norm() / levels * (1 + 1e-5)


def test_the_variance_of_qsgd_is_within_the_bound_of_its_paper() -> None:
    value, levels = normal([100], 3, torch.float64), 16
    errors = [float((round_trip(QSGD(levels), value, seed) - value).square().sum()) for seed in range(300)]
    bound = min(100 / levels**2, math.sqrt(100) / levels) * float(value.square().sum())
    assert 0 < sum(errors) / len(errors) <= bound


def test_bfloat16_equals_the_conversion_of_torch() -> None:
    value = torch.randn(100)
    assert torch.equal(round_trip(Bfloat16(), value), value.bfloat16().float())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantization(5), "bits: expected 4 or 8, got 5"),  # type: ignore[arg-type] # the mistake that is meant
        (lambda: QSGD(128), "levels: expected a whole number from 1 to 127, got 128"),
        (lambda: TopK(0.0), "ratio: expected a number above 0 and at most 1, got 0.0"),
        (lambda: Zstd(level=23), "level: expected a whole number from 1 to 22, got 23"),
    ],
)
def test_arguments_out_of_range_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_shape_that_does_not_fit_four_bit_levels_is_rejected() -> None:
    packed = {**Quantization(4).pack({"w": torch.randn(10)}, torch.Generator()), "w/shape": torch.tensor([10**12])}
    with pytest.raises(DataError, match="5 bytes do not make a tensor of"):
        Quantization(4).unpack(packed)


# ------------------------------------------------------------------ sparsification


@given(shape=SHAPES, seed=SEEDS, ratio=st.floats(0.01, 1.0))
@settings(deadline=None)
def test_top_k_keeps_only_the_largest_values(shape: list[int], seed: int, ratio: float) -> None:
    value = normal(shape, seed)
    back = round_trip(TopK(ratio), value)
    kept = back != 0
    assert int(kept.sum()) == max(1, math.ceil(ratio * value.numel()))
    assert torch.equal(back[kept], value[kept])
    if not kept.all():
        assert value[kept].abs().min() >= value[~kept].abs().max()


def encoded(codec: TopK, delta: dict[str, torch.Tensor], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    sent = codec.encode(Update(1, 1, 1, delta=delta), Upload(Task(1, 1, {}), seed=0, state=state))
    return dict(codec.unpack(sent.delta))


@given(seed=SEEDS)
@settings(deadline=None, max_examples=20)
def test_error_feedback_loses_nothing_in_total(seed: int) -> None:
    codec, state = TopK(0.1, error_feedback=True), dict[str, Any]()
    wanted, sent = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    for each in range(20):
        delta = normal([40], seed + each, torch.float64)
        wanted += delta
        sent += encoded(codec, {"w": delta}, state)["w"]
    torch.testing.assert_close(sent + state["left"]["w"], wanted, rtol=0, atol=1e-12)


def test_error_feedback_sends_the_residual_later() -> None:
    codec, state = TopK(0.5, error_feedback=True), dict[str, Any]()
    assert encoded(codec, {"w": torch.tensor([3.0, 2.0])}, state)["w"].tolist() == [3.0, 0.0]
    assert encoded(codec, {"w": torch.tensor([1.5, 0.0])}, state)["w"].tolist() == [0.0, 2.0]
    assert state["left"]["w"].tolist() == [1.5, 0.0]


def test_without_error_feedback_a_client_has_no_state() -> None:
    state: dict[str, Any] = {}
    encoded(TopK(0.5), {"w": torch.tensor([3.0, 2.0])}, state)
    assert state == {}


@pytest.mark.parametrize(
    "change",
    [
        {"w/shape": torch.tensor([10**12])},
        {"w/shape": torch.tensor([5, 5])},
        {"w/indices": torch.tensor([99], dtype=torch.int32)},
    ],
)
def test_indices_out_of_range_are_rejected(change: dict[str, torch.Tensor]) -> None:
    packed = TopK(0.1).pack({"w": torch.randn(10)}, torch.Generator())
    with pytest.raises((DataError, IndexError)):
        TopK(0.1).unpack({**packed, **change})


# ------------------------------------------------------------------ compression

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@given(
    shapes=st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), max_size=5),
    seed=SEEDS,
    level=st.integers(1, 9),
)
@settings(deadline=None)
def test_zstd_is_lossless(shapes: list[tuple[list[int], torch.dtype]], seed: int, level: int) -> None:
    weights = {f"äß/{n}": (normal(shape, seed + n) * 9).to(dtype) for n, (shape, dtype) in enumerate(shapes)}
    back = Zstd(level).unpack(Zstd(level).pack(weights, torch.Generator()))
    assert list(back) == list(weights)
    for name, value in weights.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        assert torch.equal(back[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))


def test_zstd_accepts_complex_numbers_and_views() -> None:
    weights = {"z": torch.randn(3, 2, dtype=torch.complex64), "t": torch.arange(6).reshape(2, 3).T}
    back = Zstd().unpack(Zstd().pack(weights, torch.Generator()))
    assert torch.equal(back["z"], weights["z"])
    assert torch.equal(back["t"], weights["t"])


def test_zstd_compresses_floats() -> None:
    value = torch.randn(10_000) * 0.01
    assert Zstd().pack({"w": value}, torch.Generator())["zstd"].nbytes < 0.95 * value.nbytes


def test_zstd_rejects_data_that_would_decompress_too_large() -> None:
    packed = Zstd().pack({"w": torch.zeros(10_000)}, torch.Generator())
    with pytest.raises(DataError, match="expected at most 1000 bytes, got 400"):
        Zstd(max_bytes=1000).unpack(packed)


@given(cut=st.integers(0, 200), junk=st.binary(max_size=50))
@settings(deadline=None)
def test_bytes_that_are_not_compressed_are_rejected(cut: int, junk: bytes) -> None:
    packed = Zstd().pack({"w": torch.arange(100.0)}, torch.Generator())["zstd"]
    damaged = torch.tensor(list(junk) + packed.tolist()[: min(cut, len(packed) - 1)], dtype=torch.uint8)
    with pytest.raises((DataError, LookupError, RuntimeError, ValueError, TypeError)):
        Zstd().unpack({"zstd": damaged})
