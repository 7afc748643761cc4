"""Updates of clients that have made different numbers of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dovetail.algorithms import FedAvg
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fednova import FedNova
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.messages import Update
from dovetail.federated.robust import CoordinateMedian
from dovetail.testing import AlgorithmContract

NOTHING = {"w": torch.zeros(2, dtype=torch.float64)}


class TestFedNova(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedNova:
        return FedNova()


def _update(client_id: int, num_samples: int, num_updates: int, value: float) -> Update:
    delta = {"w": torch.tensor([value, -2 * value], dtype=torch.float64)}
    return Update(client_id, 1, num_samples, num_updates, delta)


def test_with_equal_step_counts_fednova_is_fedavg() -> None:
    updates = [_update(1, 7, 3, 0.3), _update(2, 11, 3, -0.7), _update(3, 2, 3, 5.0)]
    ours = FedNova().aggregate(NOTHING, updates, weighted_mean)
    torch.testing.assert_close(ours, FedAvg().aggregate(NOTHING, updates, weighted_mean), rtol=0, atol=1e-15)


def test_one_step_and_two_steps_of_the_same_length_have_equal_weight() -> None:
    after = FedNova().aggregate(NOTHING, [_update(1, 10, 1, 1.0), _update(2, 10, 2, 2.0)], weighted_mean)
    assert after["w"].tolist() == [1.5, -3.0]


def test_samples_are_weighted_as_in_the_paper() -> None:
    # p = 1/4, 3/4; τ = 4, 2; τ_eff = 2.5; Σ p Δ / τ = 1/4 · 2/4 + 3/4 · 3/2 = 1.25.
    after = FedNova().aggregate(NOTHING, [_update(1, 1, 4, 2.0), _update(2, 3, 2, 3.0)], weighted_mean)
    assert after["w"][0].item() == pytest.approx(2.5 * 1.25, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_momentum_steps_are_normalized_to_the_length_of_sgd_steps(momentum: float) -> None:
    """For a constant gradient of −1, what SGD has moved by is how much its gradients count."""
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    for number in range(1, 8):
        weight.grad = torch.tensor(-1.0, dtype=torch.float64)
        optimizer.step()
        assert FedNova(momentum).length(number) == pytest.approx(weight.item(), rel=1e-12)


def test_an_update_without_steps_is_left_out() -> None:
    idle = replace(_update(3, 1000, 0, 0.0), delta={"w": torch.full((2,), 9.0, dtype=torch.float64)})
    two = [_update(1, 10, 1, 1.0), _update(2, 10, 2, 2.0)]
    assert FedNova().aggregate(NOTHING, [*two, idle], weighted_mean)["w"].tolist() == [1.5, -3.0]


def test_without_any_steps_the_plain_mean_is_used() -> None:
    after = FedNova().aggregate(NOTHING, [_update(1, 10, 0, 1.0), _update(2, 10, 0, 3.0)], weighted_mean)
    assert after["w"].tolist() == [2.0, -4.0]


def test_buffers_are_averaged_without_normalization() -> None:
    model, algorithm = nn.BatchNorm1d(1), FedNova()
    algorithm.prepare(model, num_clients=2)
    state = dict(model.state_dict())
    updates = []
    for number in (1, 3):
        delta = {name: torch.full_like(value, number) for name, value in state.items()}
        updates.append(Update(number, 1, 10, num_updates=4 - number, delta=delta))
    after = algorithm.aggregate(state, updates, weighted_mean)
    assert after["running_mean"].item() == 2.0
    assert after["num_batches_tracked"].item() == 2
    assert after["num_batches_tracked"].dtype == torch.int64
    # Steps of 1/3 and of 3, and 2 of them.
    assert after["bias"].item() == pytest.approx(10 / 3)
    assert after["weight"].item() == pytest.approx(1 + 10 / 3)


def test_a_robust_mean_receives_normalized_updates() -> None:
    # One step each, of 1, 2 and 90: the one in the middle, τ_eff = 2 times.
    updates = [_update(1, 1, 1, 1.0), _update(2, 1, 2, 4.0), _update(3, 1, 3, 270.0)]
    assert FedNova().aggregate(NOTHING, updates, CoordinateMedian())["w"].tolist() == [4.0, -8.0]


def test_entries_missing_from_the_update_are_unchanged() -> None:
    weights = {**NOTHING, "head": torch.tensor(1.0)}
    assert FedNova().aggregate(weights, [_update(1, 10, 1, 1.0)], weighted_mean)["head"] is weights["head"]


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_momentum_out_of_range_is_rejected(momentum: float) -> None:
    with pytest.raises(ConfigError, match="momentum: expected a number from 0 and below 1, got"):
        FedNova(momentum)
