from __future__ import annotations

import pytest
import torch
from problem import Problem
from torch import nn

from dovetail import Epochs
from dovetail.errors import ConfigError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.optimizers import LARS, AdaHessian
from dovetail.trainers.strategies import DefaultTrainingStepStrategy

# Torch warns of the cycle that a gradient with a graph makes; the loop drops gradients before every update.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")


def test_lars_moves_every_tensor_by_the_same_share_of_its_size() -> None:
    weights = [nn.Parameter(torch.full((4,), size)) for size in (0.1, 10.0)]
    optimizer = LARS(weights, lr=1.0, trust_coefficient=0.01)
    for weight, slope in zip(weights, (1000.0, 0.001), strict=True):
        weight.grad = torch.full((4,), slope)
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()
    for weight, old in zip(weights, before, strict=True):
        assert ((old - weight).norm() / old.norm()).item() == pytest.approx(0.01, rel=1e-5)


def test_lars_momentum_and_decay_follow_their_equations() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    optimizer = LARS([weight], lr=0.5, momentum=0.9, weight_decay=0.1, trust_coefficient=0.2)
    expected, buffer = weight.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for slope in (torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25])):
        slope = slope.double()
        weight.grad = slope.clone()
        optimizer.step()
        local = 0.2 * expected.norm() / (slope.norm() + 0.1 * expected.norm())
        buffer = 0.9 * buffer + 0.5 * local * (slope + 0.1 * expected)
        expected = expected - buffer
        assert torch.allclose(weight, expected, atol=1e-12)


def test_lars_moves_zero_weights_at_the_plain_rate() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, 2.0])
    LARS([weight], lr=0.1).step()
    assert torch.allclose(weight, torch.tensor([-0.1, -0.2]))


def test_adahessian_sees_the_curvature_of_a_quadratic_exactly() -> None:
    """With f = Σ ½hw² the first step is lr·w, whatever the curvatures are."""
    curvatures = torch.tensor([0.01, 1.0, 100.0], dtype=torch.float64)
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = AdaHessian([weight], lr=0.25, eps=0.0)
    (0.5 * curvatures * weight.square()).sum().backward(create_graph=True)  # type: ignore[no-untyped-call]
    optimizer.step()
    assert torch.allclose(weight.detach(), 0.75 * torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), atol=1e-12)


def test_adahessian_averages_over_the_kernel_of_a_convolution() -> None:
    layer = nn.Conv2d(1, 1, 3, bias=False)
    optimizer = AdaHessian(layer.parameters())
    layer(torch.randn(2, 1, 5, 5)).square().sum().backward(create_graph=True)
    optimizer.step()
    kept = optimizer.state[layer.weight]["exp_hessian_sq"]
    assert (kept == kept.flatten()[0]).all()


@pytest.mark.parametrize(("name", "rate"), [("LARS", 5.0), ("AdaHessian", 0.05)])
def test_lars_and_adahessian_are_registered_by_name_and_learn(problem: Problem, name: str, rate: float) -> None:
    trainer = ComposableTrainer(
        problem.model(),
        training_step_strategy=DefaultTrainingStepStrategy(create_graph=name == "AdaHessian"),
        optim_function=name,
        learning_rate=rate,
        weight_decay=0.0,
        seed=0,
        verbose=False,
    )
    losses = trainer.fit(problem.batches, max_length=Epochs(8)).get_metric_values("train_loss")
    assert losses[-1] < 0.7 * losses[0]


def test_adahessian_without_a_graph_raises_an_error_with_a_remedy(problem: Problem) -> None:
    trainer = ComposableTrainer(problem.model(), optim_function="AdaHessian", verbose=False)
    with pytest.raises(ConfigError, match="create_graph=True"):
        trainer.fit(problem.batches, max_length=Epochs(1))
