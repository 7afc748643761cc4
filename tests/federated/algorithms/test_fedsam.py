"""FedSAM: the gradient at a second place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, Point, federation, half_square, mlp, toy

from dovetail.algorithms import CompositeAlgorithm, FedAvg, FedProx
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fedprox import FedProxLossStrategy
from dovetail.federated.algorithms.fedsam import FedSAM, FedSAMStepStrategy
from dovetail.testing import AlgorithmContract, TrainingStepStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    SGDOptimizerStrategy,
    TrainingStepStrategy,
)


class TestFedSAM(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedSAM:
        return FedSAM(rho=0.3)


class TestStep(TrainingStepStrategyContract):
    changes_gradients = True

    def make(self) -> FedSAMStepStrategy:
        return FedSAMStepStrategy(rho=0.3)


class TestStepWithoutRadius(TrainingStepStrategyContract):
    def make(self) -> FedSAMStepStrategy:
        return FedSAMStepStrategy(rho=0.0)


def test_on_a_quadratic_the_gradient_is_taken_rho_further_uphill() -> None:
    # f(w) = 3 (w − 1)² / 2 at w = 2: uphill is to the right, and f'(2.5) = 4.5.
    model = Point(2.0)
    x, y = torch.tensor([[3.0, 1.0]], dtype=torch.float64), torch.zeros(1)
    step = FedSAMStepStrategy(rho=0.5)
    loss = step.training_step(model, None, x, y, half_square, TrainingContext(model))
    loss.backward()
    assert model.w.grad.item() == pytest.approx(4.5, abs=1e-12)
    assert loss.item() == pytest.approx(3 * 1.5**2 / 2, abs=1e-12)
    assert model.w.item() == 2.0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_perturbation_norm_is_over_all_trainable_parameters(is_frozen: bool) -> None:
    torch.manual_seed(0)
    model, there, (x, y) = mlp(), mlp(), Blobs().train_data(1)
    model.body.requires_grad_(not is_frozen)
    moving = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(moving) == (2 if is_frozen else 4)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(moving.values()))
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
    shifted = {name: it + 0.7 * by / norm for (name, it), by in zip(moving.items(), gradients, strict=True)}
    there.load_state_dict({**model.state_dict(), **shifted})
    nn.functional.cross_entropy(there(x), y).backward()
    loss = FedSAMStepStrategy(rho=0.7).training_step(
        model, None, x, y, nn.functional.cross_entropy, TrainingContext(model)
    )
    loss.backward()
    for name, value in model.named_parameters():
        expected = there.get_parameter(name).grad if name in moving else None
        torch.testing.assert_close(value.grad, expected, rtol=0, atol=1e-12)


def test_a_zero_gradient_gives_no_perturbation() -> None:
    model = Point(1.0)
    x, y = torch.tensor([[3.0, 1.0]], dtype=torch.float64), torch.zeros(1)
    loss = FedSAMStepStrategy().training_step(model, None, x, y, half_square, TrainingContext(model))
    loss.backward()
    assert model.w.grad.item() == 0.0


def test_fedsam_with_rho_0_is_fedavg() -> None:
    torch.testing.assert_close(federation(FedSAM(rho=0.0)).weights, federation(FedAvg()).weights, rtol=0, atol=0)
    assert not torch.equal(federation(FedSAM()).weights["head.bias"], federation(FedAvg()).weights["head.bias"])


def test_fedsam_near_rho_0_is_near_fedavg() -> None:
    ours, plain = toy(FedSAM(rho=1e-9), rounds=20).weights, toy(FedAvg(), rounds=20).weights
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-7)


def test_batchnorm_statistics_equal_a_plain_step() -> None:
    x, y = Blobs(dtype=torch.float32).train_data(1)
    model, other = (nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)) for _ in range(2))
    FedSAMStepStrategy(rho=0.5).training_step(model, None, x, y, nn.functional.cross_entropy, TrainingContext(model))
    other(x)
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()), rtol=0, atol=0)


def test_a_weight_penalty_is_computed_at_the_perturbed_weights() -> None:
    # f(w) = (w − 0)² / 2 + μ/2 (w − 2)², at w = 2: f' = 2, and 0.5 further it is 2.5 + 0.5 μ.
    model = Point(2.0)
    context = TrainingContext(model)
    penalized = FedProxLossStrategy(mu=4.0, base_loss_fn=half_square)
    penalized.on_train_start(context)
    x, y = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.zeros(1)
    loss = FedSAMStepStrategy(rho=0.5).training_step(model, None, x, y, penalized.criterion(context), context)
    loss.backward()
    assert model.w.grad.item() == pytest.approx(4.5, abs=1e-12)


def _run(step: TrainingStepStrategy, batch_size: int = 8, repeats: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    optimizer = SGDOptimizerStrategy(lr=0.1, momentum=0.9)
    trainer = ComposableTrainer(
        mlp(),
        optimizer_strategy=optimizer,
        training_step_strategy=step,
        num_epochs=2,
        batch_size=batch_size,
        verbose=False,
    )
    x, y = Blobs().train_data(1)
    # Each batch of 8 is there several times in a row.
    x, y = (it[:24].reshape(3, 8, *it.shape[1:]).repeat_interleave(repeats, dim=0).flatten(0, 1) for it in (x, y))
    trainer.fit((x, y))
    return trainer.model.state_dict()


def _sam(inside: TrainingStepStrategy | None = None) -> FedSAMStepStrategy:
    return FedSAMStepStrategy(rho=0.5, base_strategy=inside)


@pytest.mark.parametrize("is_inside", [False, True])
def test_accumulated_equal_batches_equal_one_batch(is_inside: bool) -> None:
    clipping = GradientClippingStepStrategy(max_norm=0.3)
    inside = GradientAccumulationStepStrategy(2, base_strategy=clipping if is_inside else _sam(clipping))
    step = _sam(inside) if is_inside else inside
    torch.testing.assert_close(_run(step, repeats=2), _run(_sam(clipping)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_inside", [False, True])
def test_fedsam_trains_in_mixed_precision(is_inside: bool) -> None:
    mixed = MixedPrecisionStepStrategy(enabled=True, precision="bf16", base_strategy=None if is_inside else _sam())
    step = _sam(mixed) if is_inside else mixed
    torch.testing.assert_close(_run(step), _run(_sam()), rtol=0, atol=0.05)


def test_fedsam_and_fedprox_combine() -> None:
    both = federation(CompositeAlgorithm([FedSAM(rho=0.3), FedProx(mu=0.0)]))
    torch.testing.assert_close(both.weights, federation(FedSAM(rho=0.3)).weights, rtol=0, atol=1e-12)


class _Manual(TrainingStepStrategy):
    def training_step(self, model: Any, optimizer: Any, examples: Any, labels: Any, loss: Any, context: Any) -> Tensor:
        value: Tensor = loss(model(examples), labels)
        context.backward(value)
        context.step(optimizer)
        return value


def test_a_step_that_calls_backward_itself_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"_Manual.* differentiates by itself"):
        _run(FedSAMStepStrategy(base_strategy=_Manual()))


def test_a_negative_rho_is_rejected() -> None:
    with pytest.raises(ConfigError, match="rho: expected a number that is at least 0, got -1"):
        FedSAM(rho=-1)
