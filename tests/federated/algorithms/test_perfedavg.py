"""Per-FedAvg: first-order MAML on the two halves of every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import Blobs, Point, federation, half_square, mlp

from dovetail.algorithms import Algorithm, CompositeAlgorithm, FedAvg, FedProx
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.apfl import APFL
from dovetail.federated.algorithms.perfedavg import PerFedAvg, PerFedAvgStepStrategy
from dovetail.federated.data.sources import Datasource
from dovetail.testing import AlgorithmContract, TrainingStepStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import (
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    MultipleForwardPassStepStrategy,
    SGDOptimizerStrategy,
)


class TestPerFedAvg(AlgorithmContract):
    def make(self) -> PerFedAvg:
        return PerFedAvg(alpha=0.1)


class TestStep(TrainingStepStrategyContract):
    changes_gradients = True

    def make(self) -> PerFedAvgStepStrategy:
        return PerFedAvgStepStrategy(alpha=0.1)


# f(w) = a (w - b)² / 2.
SAMPLES = [(1.0, -2.0), (3.0, 1.0), (2.0, 0.5), (0.5, 4.0), (1.5, -1.0)]


def _point(alpha: float, batch_size: int, **options: Any) -> float:
    """Train w from 2 for an epoch, with a beta of 0.1."""
    trainer = ComposableTrainer(
        Point(2.0),
        loss_strategy=half_square,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
        training_step_strategy=PerFedAvgStepStrategy(alpha),
        num_epochs=1,
        batch_size=batch_size,
        verbose=False,
        **options,
    )
    trainer.fit((torch.tensor(SAMPLES, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)))
    return float(trainer.model.w.detach())


def _slope(w: float, samples: Any) -> float:
    return sum(a * (w - b) for a, b in samples) / len(samples)


def test_perfedavg_steps_follow_the_paper() -> None:
    w = 2.0
    # Batches of 4 and 1: halves of 2, and one sample that serves as both.
    for first, second in ((SAMPLES[:2], SAMPLES[2:4]), (SAMPLES[4:], SAMPLES[4:])):
        w -= 0.1 * _slope(w - 0.3 * _slope(w, first), second)
    assert _point(0.3, batch_size=4) == pytest.approx(w, abs=1e-14)


def test_the_second_half_of_an_odd_batch_is_larger() -> None:
    w = 2.0 - 0.1 * _slope(2.0 - 0.3 * _slope(2.0, SAMPLES[:2]), SAMPLES[2:])
    assert _point(0.3, batch_size=5) == pytest.approx(w, abs=1e-14)


def test_with_alpha_zero_the_step_uses_only_the_second_half() -> None:
    assert _point(0.0, batch_size=5) == pytest.approx(2.0 - 0.1 * _slope(2.0, SAMPLES[2:]), abs=1e-14)


def test_a_window_averages_the_gradients_of_all_second_halves() -> None:
    # Batches of 3 and 2, with second halves of 2 and 1.
    slopes = [_slope(2.0 - 0.3 * _slope(2.0, SAMPLES[:1]), SAMPLES[1:3])]
    slopes += [_slope(2.0 - 0.3 * _slope(2.0, SAMPLES[3:4]), SAMPLES[4:])]
    w = 2.0 - 0.1 * (2 * slopes[0] + slopes[1]) / 3
    assert _point(0.3, batch_size=3, accumulation_steps=2) == pytest.approx(w, abs=1e-14)


class _Two(Datasource):
    """Two samples for each of two clients, with optima at their halves."""

    num_clients = 2

    def train_data(self, client_id: int) -> Any:
        b = [-2.0, 1.0][client_id - 1]
        return torch.tensor([[1.0, b], [1.0, b]], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)

    def test_data(self, client_id: int) -> Any:
        return self.train_data(client_id)


def _pair(algorithm: Algorithm, **settings: Any) -> Any:
    trainer = ComposableTrainer(
        loss_strategy=half_square,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
        num_epochs=1,
        batch_size=2,
        verbose=False,
    )
    return federation(algorithm, trainer=trainer, data=_Two(), model=Point, **settings)


def test_perfedavg_rounds_follow_the_paper() -> None:
    w = 0.0
    for _ in range(3):
        w = sum(w - 0.1 * ((w - 0.3 * (w - b)) - b) for b in (-2.0, 1.0)) / 2
    assert _pair(PerFedAvg(alpha=0.3)).weights["w"].item() == pytest.approx(w, abs=1e-14)


def test_the_personalization_round_adapts_with_plain_steps() -> None:
    server = _pair(PerFedAvg(alpha=0.3))
    w = server.weights["w"].item()
    found = server.personalize(epochs=1)
    for client_id, b in ((1, -2.0), (2, 1.0)):
        adapted = w - 0.1 * (w - b)
        assert found.metrics[client_id]["loss"] == pytest.approx((adapted - b) ** 2 / 2, abs=1e-14)


def test_the_fedprox_term_applies_to_the_sent_and_not_the_adapted_model() -> None:
    w, mu = 0.0, 0.7
    for _ in range(2):
        start, ends = w, []
        for b in (-2.0, 1.0):
            own = start
            own -= 0.1 * ((own - 0.3 * (own - b)) - b + mu * (own - start))
            ends.append(own)
        w = sum(ends) / 2
    server = _pair(CompositeAlgorithm([FedProx(mu=mu), PerFedAvg(alpha=0.3)]), rounds=2)
    assert server.weights["w"].item() == pytest.approx(w, abs=1e-14)


@pytest.mark.parametrize(
    "step",
    [
        PerFedAvgStepStrategy(0.1, base_strategy=GradientClippingStepStrategy(max_norm=1e6)),
        GradientClippingStepStrategy(max_norm=1e6, base_strategy=PerFedAvgStepStrategy(0.1)),
        PerFedAvgStepStrategy(0.1, base_strategy=MultipleForwardPassStepStrategy(2)),
    ],
)
def test_the_perfedavg_step_nests_with_other_steps(step: Any) -> None:
    def trained(step: Any) -> Any:
        torch.manual_seed(0)
        trainer = ComposableTrainer(mlp(), training_step_strategy=step, num_epochs=2, batch_size=8, verbose=False)
        trainer.fit(Blobs().train_data(1))
        return trainer.model.state_dict()

    torch.testing.assert_close(trained(step), trained(PerFedAvgStepStrategy(0.1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_perfedavg_trains_in_lower_precision(precision: Any) -> None:
    def trained(step: Any) -> Any:
        torch.manual_seed(0)
        model = mlp(torch.float32)
        trainer = ComposableTrainer(
            model,
            optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
            training_step_strategy=step,
            num_epochs=3,
            batch_size=8,
            verbose=False,
        )
        trainer.fit(Blobs(dtype=torch.float32).train_data(1))
        return model.state_dict()

    low = MixedPrecisionStepStrategy(True, precision=precision, base_strategy=PerFedAvgStepStrategy(0.5))
    torch.testing.assert_close(trained(low), trained(PerFedAvgStepStrategy(0.5)), rtol=0.05, atol=0.02)


def test_a_frozen_parameter_is_unchanged() -> None:
    model = mlp()
    model.body.weight.requires_grad_(False)
    before = model.body.weight.clone()
    trainer = ComposableTrainer(model, training_step_strategy=PerFedAvgStepStrategy(0.1), verbose=False)
    trainer.fit(Blobs().train_data(1))
    assert torch.equal(model.body.weight, before)


def test_perfedavg_differs_from_fedavg() -> None:
    one, other = federation(PerFedAvg(alpha=0.1)).weights, federation(FedAvg()).weights
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_two_algorithms_that_compute_batches_are_rejected() -> None:
    with pytest.raises(ConfigError, match="PerFedAvg and APFL both decide how a batch is computed"):
        CompositeAlgorithm([PerFedAvg(), APFL()])


def test_perfedavg_rejects_invalid_arguments() -> None:
    with pytest.raises(ConfigError, match="alpha: expected a number that is at least 0, got -1"):
        PerFedAvg(alpha=-1)
