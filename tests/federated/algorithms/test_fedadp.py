"""Updates that count by their angle to all together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dovetail.algorithms import FedAvg
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fedadp import FedAdp
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.messages import Update
from dovetail.testing import AlgorithmContract

NOTHING = {"w": torch.zeros(2, dtype=torch.float64)}


class TestFedAdp(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedAdp:
        return FedAdp()


def _update(client_id: int, num_samples: int, x: float, y: float) -> Update:
    return Update(client_id, 1, num_samples, 1, {"w": torch.tensor([x, y], dtype=torch.float64)})


def _after(algorithm: FedAdp, *updates: Update) -> Tensor:
    return algorithm.aggregate(NOTHING, updates, weighted_mean)["w"]


def _f(angle: float, alpha: float = 5.0) -> float:
    return alpha * (1 - math.exp(-math.exp(-alpha * (angle - 1))))


# With 20 and 10 samples, the mean of (1, 0) and (0, 1) is (2, 1) / 3.
FIRST, SECOND = math.atan2(1, 2), math.atan2(2, 1)


def test_equal_updates_are_weighted_by_samples() -> None:
    updates = [_update(1, 10, 0.3, 0.4), _update(2, 30, 0.6, 0.8)]
    expected = FedAvg().aggregate(NOTHING, updates, weighted_mean)["w"]
    assert _after(FedAdp(), *updates).tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_updates_are_weighted_by_samples_and_angles() -> None:
    weights = [20 * math.exp(_f(FIRST)), 10 * math.exp(_f(SECOND))]
    after = _after(FedAdp(), _update(1, 20, 1.0, 0.0), _update(2, 10, 0.0, 1.0))
    assert after.tolist() == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-12)


@pytest.mark.parametrize(("angle", "alpha"), [(0.0, 5.0), (1.0, 5.0), (math.pi / 2, 5.0), (math.pi, 2.0)])
def test_the_contribution_is_the_gompertz_function(angle: float, alpha: float) -> None:
    assert FedAdp(alpha).contribution(angle) == pytest.approx(_f(angle, alpha), rel=1e-12)


def test_a_client_opposed_to_all_others_has_a_small_weight() -> None:
    same = [_update(k, 10, 1.0, 0.0) for k in (1, 2, 3)]
    after = _after(FedAdp(), *same, _update(4, 10, -1.0, 0.0))
    assert after[0].item() == pytest.approx((3 - math.exp(-5)) / (3 + math.exp(-5)), abs=1e-3)


def test_the_angle_of_a_client_is_the_mean_over_its_rounds() -> None:
    algorithm = FedAdp()
    _after(algorithm, _update(1, 20, 1.0, 0.0), _update(2, 10, 0.0, 1.0))
    # The second is away; the third is new.
    _after(algorithm, _update(1, 10, 0.0, 1.0), _update(3, 20, 1.0, 0.0))
    assert algorithm.angles == pytest.approx({"1": (FIRST + SECOND) / 2, "2": SECOND, "3": FIRST}, abs=1e-12)
    assert algorithm.rounds == {"1": 2, "2": 1, "3": 1}


def test_two_rounds_saved_plus_one_equal_three_rounds() -> None:
    rounds = [[_update(k, 10 * k, math.cos(n * k), math.sin(n * k)) for k in (1, 2, 3)] for n in (1, 2, 3)]
    whole, before, after = FedAdp(), FedAdp(), FedAdp()
    expected = [_after(whole, *updates) for updates in rounds]
    for updates in rounds[:2]:
        _after(before, *updates)
    after.load_state_dict(before.state_dict())
    assert torch.equal(_after(after, *rounds[2]), expected[2])
    assert before.rounds == {"1": 2, "2": 2, "3": 2}


def test_a_zero_update_has_a_right_angle() -> None:
    algorithm = FedAdp()
    after = _after(algorithm, _update(1, 10, 1.0, 0.0), _update(2, 10, 0.0, 0.0))
    assert algorithm.angles["2"] == math.pi / 2
    assert after[0].item() == pytest.approx(1 / (1 + math.exp(_f(math.pi / 2) - _f(0.0))), abs=1e-12)


def test_updates_that_cancel_have_no_angles() -> None:
    assert _after(FedAdp(), _update(1, 10, 1.0, 0.0), _update(2, 10, -1.0, 0.0)).tolist() == [0.0, 0.0]


def test_angles_ignore_buffers() -> None:
    model, algorithm = nn.BatchNorm1d(1), FedAdp()
    algorithm.prepare(model, num_clients=2)
    state = dict(model.state_dict())
    updates = []
    for client_id, far in ((1, 100), (2, -100)):
        delta = {name: torch.full_like(value, far) for name, value in state.items()}
        updates.append(Update(client_id, 1, 10, 1, {**delta, "weight": torch.ones(1), "bias": torch.ones(1)}))
    after = algorithm.aggregate(state, updates, weighted_mean)
    assert algorithm.angles == pytest.approx({"1": 0.0, "2": 0.0}, abs=1e-7)
    assert after["running_mean"].item() == pytest.approx(0.0, abs=1e-6)
    assert after["num_batches_tracked"].item() == 0
    assert after["num_batches_tracked"].dtype == torch.int64


def test_a_large_alpha_does_not_overflow() -> None:
    after = _after(FedAdp(1e4), _update(1, 20, 1.0, 0.0), _update(2, 10, 0.0, 1.0))
    assert after.tolist() == pytest.approx([1.0, 0.0])


def test_entries_missing_from_the_update_are_unchanged() -> None:
    weights = {**NOTHING, "head": torch.tensor(1.0)}
    assert FedAdp().aggregate(weights, [_update(1, 10, 1.0, 0.0)], weighted_mean)["head"] is weights["head"]


def test_alpha_must_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="alpha: expected a number above 0, got 0"):
        FedAdp(0)
