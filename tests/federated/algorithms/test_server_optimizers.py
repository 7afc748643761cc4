"""Servers that step as optimizers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.algorithms import FedAvg
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimizer
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.messages import Update
from dovetail.federated.robust import CoordinateMedian
from dovetail.testing import AlgorithmContract

ALL = [FedAvgM, FedAdagrad, FedAdam, FedYogi]
ADAPTIVE = [FedAdagrad, FedAdam, FedYogi]


def _round(*values: float) -> list[Update]:
    return [
        Update(k, 1, 10 * k, delta={"w": torch.tensor([value, -value / 2], dtype=torch.float64)})
        for k, value in enumerate(values, start=1)
    ]


ROUNDS = [_round(1.0, 0.4), _round(-0.2, 0.1), _round(0.3, 0.6)]


def _weights() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.5, 2.0], dtype=torch.float64)}


def _after(algorithm: ServerOptimizer, rounds: list[list[Update]]) -> dict[str, Tensor]:
    weights = _weights()
    for updates in rounds:
        weights = algorithm.aggregate(weights, updates, weighted_mean)
    return weights


class TestFedAvgM(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedAvgM:
        return FedAvgM()


class TestFedAdagrad(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedAdagrad:
        return FedAdagrad()


class TestFedAdam(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedAdam:
        return FedAdam()


class TestFedYogi(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedYogi:
        return FedYogi()


def test_without_momentum_fedavgm_is_fedavg() -> None:
    ours, weights = _after(FedAvgM(server_learning_rate=1.0, momentum=0.0), ROUNDS), _weights()
    for updates in ROUNDS:
        weights = FedAvg().aggregate(weights, updates, weighted_mean)
    assert torch.equal(ours["w"], weights["w"])


def test_fedavgm_adds_the_momentum_of_earlier_rounds() -> None:
    # The means are 0.6 and 0, so that 0.6 and half of it again are gone.
    rounds = [_round(0.6, 0.6), _round(0.2, -0.1)]
    assert _after(FedAvgM(2.0, momentum=0.5), rounds)["w"].tolist() == pytest.approx([0.5 + 1.8, 2.0 - 0.9])


# Of Δ = 0.6 and then 0.3 in the first number, with η = 0.1, β₁ = 0.9, β₂ = 0.99 and τ = 0.001.
KNOWN = {
    FedAdagrad: [
        0.1 * 0.6 / ((1e-6 + 0.36) ** 0.5 + 1e-3),
        0.1 * 0.3 / ((1e-6 + 0.36 + 0.09) ** 0.5 + 1e-3),
    ],
    FedAdam: [
        0.1 * 0.06 / ((0.99e-6 + 0.0036) ** 0.5 + 1e-3),
        0.1 * 0.084 / ((0.99 * (0.99e-6 + 0.0036) + 0.0009) ** 0.5 + 1e-3),
    ],
    # The first square is above v, and so is the second.
    FedYogi: [
        0.1 * 0.06 / ((1e-6 + 0.0036) ** 0.5 + 1e-3),
        0.1 * 0.084 / ((1e-6 + 0.0036 + 0.0009) ** 0.5 + 1e-3),
    ],
}


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_two_rounds_of_server_optimizers_follow_the_paper(kind: type[ServerOptimizer]) -> None:
    after = _after(kind(), [_round(0.6, 0.6), _round(0.3, 0.3)])
    assert after["w"][0].item() == pytest.approx(0.5 + sum(KNOWN[kind]), abs=1e-12)


def test_yogi_forgets_a_large_square_slowly_and_adam_fast() -> None:
    rounds = [_round(10.0, 10.0), *[_round(0.1, 0.1)] * 20]
    moments = {}
    for kind in (FedAdam, FedYogi):
        algorithm = kind()
        _after(algorithm, rounds)
        moments[kind] = algorithm.state_dict()["moments"]["w"]["v"][0].item()
    assert moments[FedAdam] == pytest.approx(0.99**20, rel=0.01)
    assert moments[FedYogi] == pytest.approx(1 - 20 * 0.01 * 0.01, rel=1e-5)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_without_tau_fedadam_ignores_the_scale_of_updates(size: float) -> None:
    tiny = FedAdam(tau=1e-15)
    expected = _after(FedAdam(tau=1e-15), [_round(0.6, 0.6)])["w"]
    assert torch.allclose(_after(tiny, [_round(0.6 * size, 0.6 * size)])["w"], expected, atol=1e-8)


@pytest.mark.parametrize("kind", ALL)
def test_two_rounds_saved_plus_one_equal_three_rounds(kind: type[ServerOptimizer]) -> None:
    before, after = kind(), kind()
    weights = _after(before, ROUNDS[:2])
    after.load_state_dict(before.state_dict())
    # Continuing does not change the saved state.
    resumed = after.aggregate(weights, ROUNDS[2], weighted_mean)
    assert torch.equal(before.aggregate(weights, ROUNDS[2], weighted_mean)["w"], resumed["w"])
    assert torch.equal(_after(kind(), ROUNDS)["w"], resumed["w"])


@pytest.mark.parametrize("kind", ALL)
def test_buffers_move_by_the_mean_and_integers_remain_integers(kind: type[ServerOptimizer]) -> None:
    model = nn.BatchNorm1d(2)
    algorithm = kind()
    algorithm.prepare(model, num_clients=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    delta = {name: torch.full_like(value, -3 if value.dtype == torch.int64 else -0.5) for name, value in state.items()}
    updates = [Update(k, 1, 10, delta=delta) for k in (1, 2)]
    for _ in range(2):
        state = algorithm.aggregate(state, updates, weighted_mean)
    assert state["running_var"].tolist() == [0.0, 0.0]
    assert state["running_mean"].tolist() == [-1.0, -1.0]
    assert state["num_batches_tracked"].dtype == torch.int64
    assert state["num_batches_tracked"].item() == -6
    assert algorithm.state_dict()["moments"].keys() == {"weight", "bias"}


def test_a_parameter_with_two_names_is_stepped_under_both() -> None:
    tied = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "last": nn.Linear(2, 2, bias=False)})
    tied["last"].weight = tied["first"].weight
    algorithm = FedAdam()
    algorithm.prepare(tied, num_clients=1)
    state = tied.state_dict()
    update = Update(1, 1, 10, delta={name: torch.ones_like(value) for name, value in state.items()})
    after = algorithm.aggregate(state, [update], weighted_mean)
    assert torch.equal(after["first.weight"], after["last.weight"])


@pytest.mark.parametrize("kind", ALL)
def test_entries_missing_from_the_update_are_unchanged(kind: type[ServerOptimizer]) -> None:
    weights = {**_weights(), "head": torch.tensor(1.0)}
    assert kind().aggregate(weights, ROUNDS[0], weighted_mean)["head"] is weights["head"]


def test_second_moments_of_half_precision_are_stored_in_full_precision() -> None:
    algorithm = FedAdam()
    update = Update(1, 1, 10, delta={"w": torch.tensor([1e-4], dtype=torch.float16)})
    after = algorithm.aggregate({"w": torch.ones(1, dtype=torch.float16)}, [update], weighted_mean)
    assert after["w"].dtype == torch.float16
    assert algorithm.state_dict()["moments"]["w"]["v"].dtype == torch.float32
    assert algorithm.state_dict()["moments"]["w"]["v"].item() == pytest.approx(0.99e-6 + 1e-10, rel=1e-3)


def test_the_server_step_uses_the_chosen_aggregator() -> None:
    updates = [*_round(0.6, 0.6), Update(3, 1, 10**6, delta={"w": torch.full((2,), 1e30, dtype=torch.float64)})]
    after = FedAdam().aggregate(_weights(), updates, CoordinateMedian())
    assert after["w"][0].item() == pytest.approx(0.5 + KNOWN[FedAdam][0], abs=1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedAvgM(server_learning_rate=0), "server_learning_rate: expected a number above 0, got 0"),
        (lambda: FedAvgM(momentum=1.0), "momentum: expected a number from 0 and below 1, got 1.0"),
        (lambda: FedAdam(beta_1=-0.1), "beta_1: expected a number from 0 and below 1, got -0.1"),
        (lambda: FedYogi(beta_2=1), "beta_2: expected a number from 0 and below 1, got 1"),
        (lambda: FedAdagrad(tau=0.0), "tau: expected a number above 0, got 0.0"),
        (lambda: FedAdam(tau=float("nan")), "tau: expected a number above 0, got nan"),
    ],
)
def test_server_optimizers_reject_invalid_arguments(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_the_repr_shows_settings_that_are_not_defaults() -> None:
    assert repr(FedAdam(server_learning_rate=0.01)) == "FedAdam(server_learning_rate=0.01)"
    assert repr(FedAvgM()) == "FedAvgM()"


# ------------------------------------------------------------------ Flower's


def _flower(name: str, **settings: Any) -> Any:
    strategies = pytest.importorskip("flwr.serverapp.strategy", reason="the extra `flower` is not installed")
    return pytest.importorskip("dovetail.federated.algorithms.flower").FlowerStrategy(
        getattr(strategies, name)(**settings)
    )


def _from_nothing(algorithm: ServerOptimizer) -> ServerOptimizer:
    """Flower's v starts at 0, and not at τ²."""
    nothing = torch.zeros(2, dtype=torch.float64)
    algorithm.load_state_dict({"moments": {"w": {"m": nothing, "v": nothing}}})
    return algorithm


@pytest.mark.parametrize(
    ("ours", "name", "settings"),
    [
        (lambda: FedAvgM(0.5, momentum=0.9), "FedAvgM", {"server_learning_rate": 0.5, "server_momentum": 0.9}),
        (lambda: _from_nothing(FedAdagrad(0.2)), "FedAdagrad", {"eta": 0.2}),
        (lambda: _from_nothing(FedYogi(0.2)), "FedYogi", {"eta": 0.2}),
    ],
    ids=["FedAvgM", "FedAdagrad", "FedYogi"],
)
def test_flower_gives_the_same_result_after_three_rounds(
    ours: Callable[[], Any], name: str, settings: dict[str, Any]
) -> None:
    expected = _after(_flower(name, **settings), ROUNDS)
    assert _after(ours(), ROUNDS)["w"].tolist() == pytest.approx(expected["w"].tolist(), abs=1e-12)


def test_flower_adam_gives_the_same_result_with_rates_converted() -> None:
    """Flower corrects the rate for the beginning of the moments, as Kingma and Ba do, one round ahead."""
    ours, theirs, weights = _from_nothing(FedAdam()), _flower("FedAdam"), _weights()
    assert isinstance(ours, FedAdam)
    for number, updates in enumerate(ROUNDS, start=1):
        ours.server_learning_rate = 0.1 * (1 - 0.99 ** (number + 1)) ** 0.5 / (1 - 0.9 ** (number + 1))
        expected = theirs.aggregate(weights, updates, weighted_mean)
        weights = ours.aggregate(weights, updates, weighted_mean)
        assert weights["w"].tolist() == pytest.approx(expected["w"].tolist(), abs=1e-12)
