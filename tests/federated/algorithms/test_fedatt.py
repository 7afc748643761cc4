"""Attention over clients, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fedatt import FedAtt
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.messages import Update
from dovetail.testing import AlgorithmContract


class TestFedAtt(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedAtt:
        return FedAtt()


def _weights() -> dict[str, Tensor]:
    return {"w": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}


def _update(client_id: int, w: tuple[float, float], b: float) -> Update:
    delta = {"w": torch.tensor(w, dtype=torch.float64), "b": torch.tensor([b], dtype=torch.float64)}
    return Update(client_id, 1, 10**client_id, 1, delta)


TWO = [_update(1, (3.0, 4.0), 1.0), _update(2, (0.0, 4.0), -2.0)]


def test_every_tensor_has_a_separate_attention() -> None:
    after = FedAtt(epsilon=1.2, magnitude=0.0).aggregate(_weights(), TWO, weighted_mean)
    # Distances of 5 and 4, and of 1 and 2; samples count for nothing.
    near, far = 1 / (1 + math.e), math.e / (1 + math.e)
    assert after["w"].tolist() == pytest.approx([1.2 * 3 * far, 1.2 * 4], abs=1e-12)
    assert after["b"].item() == pytest.approx(1.2 * (near - 2 * far), abs=1e-12)


def test_the_server_steps_toward_clients_that_agree() -> None:
    updates = [_update(k, (1.0, -2.0), 0.5) for k in (1, 2, 3)]
    after = FedAtt(epsilon=0.5, magnitude=0.0).aggregate(_weights(), updates, weighted_mean)
    assert after["w"].tolist() == pytest.approx([0.5, -1.0], abs=1e-12)
    assert after["b"].item() == pytest.approx(0.25, abs=1e-12)


def test_large_distances_do_not_overflow() -> None:
    updates = [_update(1, (1e6, 0.0), 1.0), _update(2, (0.0, 1.0), 1.0)]
    after = FedAtt(epsilon=1.0, magnitude=0.0).aggregate(_weights(), updates, weighted_mean)
    assert after["w"].tolist() == [1e6, 0.0]


def test_the_noise_has_the_configured_magnitude() -> None:
    weights = {"w": torch.zeros(20_000, dtype=torch.float64)}
    update = Update(1, 1, 10, 1, {"w": torch.ones(20_000, dtype=torch.float64)})
    noise = FedAtt(epsilon=1.0, magnitude=0.01).aggregate(weights, [update], weighted_mean)["w"] - 1
    assert noise.std().item() == pytest.approx(0.01, rel=0.03)
    assert noise.mean().item() == pytest.approx(0.0, abs=0.0003)


def test_two_rounds_saved_plus_one_equal_three_rounds() -> None:
    whole, before, after = FedAtt(), FedAtt(), FedAtt()
    expected = [whole.aggregate(_weights(), TWO, weighted_mean)["w"] for _ in range(3)]
    for _ in range(2):
        before.aggregate(_weights(), TWO, weighted_mean)
    after.load_state_dict(before.state_dict())
    assert torch.equal(after.aggregate(_weights(), TWO, weighted_mean)["w"], expected[2])
    # Every round has different noise.
    assert not torch.equal(expected[0], expected[1])


def test_the_noise_depends_only_on_the_seed() -> None:
    torch.manual_seed(1)
    first = FedAtt(seed=3).aggregate(_weights(), TWO, weighted_mean)["w"]
    torch.manual_seed(2)
    assert torch.equal(FedAtt(seed=3).aggregate(_weights(), TWO, weighted_mean)["w"], first)
    assert not torch.equal(FedAtt(seed=4).aggregate(_weights(), TWO, weighted_mean)["w"], first)


def test_noise_is_not_added_to_unchanged_tensors() -> None:
    updates = [_update(k, (0.0, 0.0), 1.0) for k in (1, 2)]
    after = FedAtt().aggregate(_weights(), updates, weighted_mean)
    assert after["w"].tolist() == [0.0, 0.0]
    assert after["b"].item() not in (0.0, 1.2)


def test_buffers_are_averaged_without_attention() -> None:
    model, algorithm = nn.BatchNorm1d(1), FedAtt()
    algorithm.prepare(model, num_clients=2)
    state = dict(model.state_dict())
    updates = []
    for number in (1, 3):
        delta = {name: torch.full_like(value, number) for name, value in state.items()}
        updates.append(Update(number, 1, 10, 1, delta))
    after = algorithm.aggregate(state, updates, weighted_mean)
    assert after["running_mean"].item() == 2.0
    assert after["num_batches_tracked"].item() == 2
    assert after["num_batches_tracked"].dtype == torch.int64


def test_entries_missing_from_the_update_are_unchanged() -> None:
    weights = {**_weights(), "head": torch.tensor(1.0)}
    assert FedAtt().aggregate(weights, TWO, weighted_mean)["head"] is weights["head"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedAtt(epsilon=0), "epsilon: expected a number above 0, got 0"),
        (lambda: FedAtt(magnitude=-1), "magnitude: expected a number that is at least 0, got -1"),
    ],
)
def test_fedatt_rejects_invalid_arguments(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
