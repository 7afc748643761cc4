"""What servers and clients send each other."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch

from dovetail.federated.messages import Task, Update, WeightedSum, num_bytes


def _updates(number: int) -> list[Update]:
    generator = torch.Generator().manual_seed(0)
    return [
        Update(k, 1, 10 * k, delta={"w": torch.randn(3, generator=generator, dtype=torch.float64)})
        for k in range(1, number + 1)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_sums_of_updates_are_associative(size: int) -> None:
    updates = _updates(7)
    groups = [WeightedSum.of(updates[first : first + size]) for first in range(0, 7, size)]
    total = reduce(add, groups)
    assert total.weight == 280
    torch.testing.assert_close(total.mean(), WeightedSum.of(updates).mean(), rtol=1e-14, atol=1e-14)


def test_the_mean_of_updates_is_weighted_by_samples() -> None:
    ups = [Update(k, 1, n, delta={"w": torch.tensor([v])}) for k, n, v in [(1, 1, 4.0), (2, 3, 8.0)]]
    assert WeightedSum.of(ups).mean()["w"].tolist() == [7.0]


def test_the_mean_of_updates_without_samples_is_zero() -> None:
    ups = [Update(1, 1, 0, delta={"w": torch.tensor([4.0])})]
    assert WeightedSum.of(ups).mean()["w"].tolist() == [0.0]


def test_integers_are_summed_exactly() -> None:
    # float32 has no number between these two.
    ups = [Update(k, 1, 1, delta={"n": torch.tensor(2**24 + 1)}) for k in (1, 2)]
    assert WeightedSum.of(ups).mean()["n"].item() == 2**24 + 1


def test_message_sizes_equal_the_bytes_sent() -> None:
    task = Task(1, 1, {"w": torch.zeros(4)}, payload={"c": torch.zeros(2, dtype=torch.float64), "rounds": 3})
    assert task.num_bytes == 16 + 16 + 8
    # The server's own notes are not sent.
    update = Update(1, 1, 10, delta={"w": torch.zeros(4, dtype=torch.float16)}, sent=task.weights)
    assert update.num_bytes == 8
    assert num_bytes([b"abc", ("de", torch.zeros(1))]) == 3 + 2 + 4
    assert num_bytes({"array": np.zeros(100)}) == 800


def test_an_update_survives_a_round_trip_through_plain_values() -> None:
    update = replace(_updates(1)[0], payload={"c": 1}, metrics={"loss": 0.5}, staleness=2, sent={"w": torch.ones(3)})
    plain = update.to_plain()
    assert plain["delta"]["w"] is update.delta["w"]
    assert Update(**plain) == update


def test_messages_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        _updates(1)[0].num_samples = 3  # type: ignore[misc]
