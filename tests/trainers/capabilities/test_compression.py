"""Compression of gradients: sums of compressed messages, error feedback, and rejected values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.trainers import DDPTrainer, FSDPTrainer, PowerSGD, Trainer
from dovetail.trainers.capabilities import HalfPrecision
from dovetail.trainers.capabilities.compression import Codec, Compression, as_compression, mean_state, unit_of

SHAPES = [(30, 40), (7,), (20, 5, 6)]


class Rank:
    """One of several processes, whose messages a test sums."""

    def __init__(self, compression: Compression, unit: float = 1.0) -> None:
        sizes = [torch.Size(shape).numel() for shape in SHAPES]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64)
        self.parts = [part.view(shape) for part, shape in zip(torch.split(self.flat, sizes), SHAPES, strict=True)]
        self.codec = compression.codec(self.parts, self.flat, unit, 0)


def average(ranks: list[Rank], gradients: list[Tensor], weights: list[float]) -> Tensor:
    """Return the mean of the gradients of all ranks, sent as the messages of their codecs."""
    firsts = []
    for rank, gradient, weight in zip(ranks, gradients, weights, strict=True):
        rank.flat.copy_(gradient * weight)
        firsts.append(rank.codec.encode(weight))
    add_up(firsts)
    add_up([rank.codec.second_messages() for rank in ranks])
    for rank, weight in zip(ranks, weights, strict=True):
        rank.codec.decode(weight, sum(weights), [float(len(ranks))] * len(SHAPES))
    assert all(torch.allclose(rank.flat, ranks[0].flat, rtol=0, atol=0, equal_nan=True) for rank in ranks)
    return ranks[0].flat / sum(weights)


def add_up(messages: list[list[Tensor]]) -> None:
    for same in zip(*messages, strict=True):
        total = torch.stack(same).sum(dim=0)
        for message in same:
            message.copy_(total)


def errors(codec: Codec) -> Tensor:
    found = [it.get("error", torch.zeros(1)) for it in codec.state()]
    return torch.cat([found[0].flatten(), torch.zeros(7), found[2].flatten()])


def drawn(number: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = sum(torch.Size(shape).numel() for shape in SHAPES)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(number)]


def test_powersgd_stores_the_error_of_every_average() -> None:
    """The sum of all averages and of the mean error is the sum of all true means."""
    ranks, weights = [Rank(PowerSGD(rank=1)) for _ in range(3)], [2.0, 3.0, 5.0]
    sent, true = torch.zeros(1), torch.zeros(1)
    for step in range(6):
        gradients = drawn(3, seed=step)
        true = true + sum(gradient * weight for gradient, weight in zip(gradients, weights, strict=True)) / 10
        sent = sent + average(ranks, gradients, weights)
        assert (sent - true).abs().max() > 0.1
    error = sum(errors(rank.codec) * weight for rank, weight in zip(ranks, weights, strict=True)) / 10
    torch.testing.assert_close(sent + error, true, rtol=0, atol=1e-12)


def test_an_idle_process_keeps_its_error() -> None:
    ranks = [Rank(PowerSGD(rank=1)) for _ in range(2)]
    average(ranks, drawn(2), [1.0, 1.0])
    before = errors(ranks[1].codec)
    assert before.any()
    average(ranks, [drawn(1)[0], torch.zeros(1)], [1.0, 0.0])
    assert errors(ranks[1].codec).equal(before)


def test_a_gradient_that_is_not_finite_leaves_no_trace_in_later_ones() -> None:
    ranks = [Rank(PowerSGD(rank=1))]
    average(ranks, drawn(1), [1.0])
    before = errors(ranks[0].codec)
    assert not average(ranks, [drawn(1)[0] * torch.inf], [1.0]).isfinite().all()
    assert errors(ranks[0].codec).equal(before)
    assert average(ranks, drawn(1), [1.0]).isfinite().all()


def test_vectors_and_small_matrices_are_sent_whole() -> None:
    ranks, gradients = [Rank(PowerSGD(rank=1)) for _ in range(2)], drawn(2)
    whole = (gradients[0] + gradients[1]) / 2
    assert average(ranks, gradients, [1.0, 1.0])[1200:1207].equal(whole[1200:1207])


def test_another_number_of_processes_shares_the_mean_of_all_errors() -> None:
    ranks = [Rank(PowerSGD(rank=1)) for _ in range(3)]
    average(ranks, drawn(3), [1.0, 1.0, 1.0])
    states = [{"0": {"unit": 1.0, "parameters": rank.codec.state()}} for rank in ranks]
    heir = Rank(PowerSGD(rank=1))
    heir.codec.load(mean_state(states)["0"]["parameters"])
    expected = torch.stack([errors(rank.codec) for rank in ranks]).mean(dim=0)
    torch.testing.assert_close(errors(heir.codec), expected, rtol=0, atol=1e-15)


def test_float16_holds_the_weighted_sums_of_large_batches() -> None:
    """A million items would overflow without the division by a power of two."""
    gradients, weights = drawn(2), [1e6, 2e6]
    expected = (gradients[0] * 1e6 + gradients[1] * 2e6) / 3e6
    unit = unit_of(sum(weights))
    found = average([Rank(HalfPrecision(torch.float16), unit) for _ in range(2)], gradients, weights)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    assert unit in (2.0**21, 2.0**22)


@pytest.mark.parametrize("value", ["bf61", 16, True])
def test_an_unknown_compression_is_rejected_with_the_names(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"compression: expected None, 'bf16', 'fp16', 'powersgd' or PowerSGD\(rank"):
        DDPTrainer(Trainer(nn.Linear(2, 2), "cpu"), compression=value)


@pytest.mark.parametrize(("name", "value"), [("rank", 0), ("rank", 1.5), ("warm_up", -1), ("warm_up", True)])
def test_powersgd_rejects_numbers_that_are_not_counts(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"PowerSGD: {name}: expected a whole number that is at least"):
        PowerSGD(**{name: value})


def test_a_name_and_its_object_are_the_same_compression() -> None:
    assert as_compression("powersgd") == PowerSGD()
    assert as_compression("bf16") == HalfPrecision(torch.bfloat16)


def test_a_sharded_trainer_rejects_compression() -> None:
    with pytest.raises(ConfigError, match="compression: torch sends the gradients of a sharded model block by block"):
        FSDPTrainer(Trainer(nn.Linear(2, 2), "cpu"), compression="bf16")
