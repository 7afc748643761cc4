"""Optimizer strategies against the optimizers of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand, weights
from torch import nn
from torch.optim import Optimizer

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    AdamWOptimizerStrategy,
    DefaultOptimizerStrategy,
    GradientClippingOptimizerStrategy,
    OptimizerStrategy,
    ParameterGroupOptimizerStrategy,
    RMSpropOptimizerStrategy,
    SGDOptimizerStrategy,
)

PAIRS = [
    (
        SGDOptimizerStrategy(0.1, 0.9, 0.01, 0.0, True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    (SGDOptimizerStrategy(0.1, 0.9, dampening=0.5), partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)),
    (
        AdamOptimizerStrategy(0.01, (0.8, 0.9), 1e-6, 0.1, True),
        partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, amsgrad=True),
    ),
    (AdamWOptimizerStrategy(0.01), partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01)),
    (
        RMSpropOptimizerStrategy(0.01, 0.9, 1e-6, 0.1, 0.5, True),
        partial(torch.optim.RMSprop, lr=0.01, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.5, centered=True),
    ),
]


@pytest.mark.parametrize(("strategy", "of_torch"), PAIRS)
def test_training_with_an_optimizer_strategy_equals_the_torch_optimizer(
    strategy: Any, of_torch: Any, problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model, by_hand = problem.model(), problem.model()
    train(model, problem.batches, optimizer_strategy=strategy)
    train_by_hand(by_hand, problem.batches, of_torch(by_hand.parameters()))
    assert_same_weights(model, by_hand)


@pytest.mark.parametrize(
    "strategy",
    [
        SGDOptimizerStrategy(),
        AdamOptimizerStrategy(),
        AdamWOptimizerStrategy(),
        RMSpropOptimizerStrategy(),
        ParameterGroupOptimizerStrategy(torch.optim.SGD, lambda model: [{"params": model.parameters()}]),
        DefaultOptimizerStrategy(),
    ],
)
def test_a_rate_of_none_uses_the_rate_of_the_configuration(
    strategy: OptimizerStrategy, context: TrainingContext
) -> None:
    without = strategy.create_optimizer(nn.Linear(1, 1), context)
    context.config["lr"] = 0.3
    configured = strategy.create_optimizer(nn.Linear(1, 1), context)
    assert [group["lr"] for group in [*without.param_groups, *configured.param_groups]] == [0.01, 0.3]


def test_the_default_optimizer_takes_name_and_settings_from_the_configuration(context: TrainingContext) -> None:
    context.config = {"optimizer": "AdamW", "parameters": {"optimizer": {"lr": 0.2, "weight_decay": 0.5}}}
    optimizer = DefaultOptimizerStrategy().create_optimizer(nn.Linear(1, 1), context)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.2, 0.5)


def test_an_unknown_optimizer_in_the_configuration_suggests_the_nearest(context: TrainingContext) -> None:
    context.config["optimizer"] = "Adan"
    with pytest.raises(UnknownNameError, match="did you mean 'Adam'"):
        DefaultOptimizerStrategy().create_optimizer(nn.Linear(1, 1), context)


def test_the_default_optimizer_calls_its_function_with_the_model(context: TrainingContext) -> None:
    strategy = DefaultOptimizerStrategy(lambda model: torch.optim.SGD([model.bias], lr=0.5))
    model = nn.Linear(1, 1)
    assert strategy.create_optimizer(model, context).param_groups[0]["params"] == [model.bias]


def test_parameter_groups_keep_their_own_settings(context: TrainingContext) -> None:
    model = nn.Linear(1, 1)
    strategy = ParameterGroupOptimizerStrategy(
        torch.optim.SGD,
        lambda model: [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "momentum": 0.1}],
        default_lr=0.2,
        momentum=0.9,
    )
    groups = strategy.create_optimizer(model, context).param_groups
    assert [(group["lr"], group["momentum"]) for group in groups] == [(0.5, 0.9), (0.2, 0.1)]


def test_a_parameter_that_is_unfrozen_later_is_trained(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model = problem.model()
    model[0].requires_grad_(False)
    before = weights(model)

    def thaw(context: TrainingContext) -> None:
        model[0].requires_grad_(True)

    train(model, problem.batches, optimizer_strategy=SGDOptimizerStrategy(0.1), model_update_strategy=thaw)
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_model_without_trainable_parameters_is_rejected(context: TrainingContext) -> None:
    with pytest.raises(ConfigError, match="nothing to optimise"):
        SGDOptimizerStrategy(0.1).create_optimizer(nn.Linear(1, 1).requires_grad_(False), context)


def test_clipping_clips_before_the_step(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    # P-PL-5: the original clips after the step, and the parameters move by a hundred.
    model = problem.model()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    strategy = GradientClippingOptimizerStrategy(SGDOptimizerStrategy(lr=1.0), max_norm=1e-3)
    train(model, [(1e4 * problem.x, problem.y)], optimizer_strategy=strategy)
    moved = (nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_clipping_follows_its_norm_type() -> None:
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, 4.0])
    strategy = GradientClippingOptimizerStrategy(SGDOptimizerStrategy(), max_norm=2.0, norm_type=torch.inf)
    strategy.on_gradients(torch.optim.SGD([weight]), TrainingContext())
    torch.testing.assert_close(weight.grad, torch.tensor([1.5, 2.0]))


def test_clipping_forwards_hooks_to_its_base(context: TrainingContext) -> None:
    received = []

    class Listening(SGDOptimizerStrategy):
        def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
            received.append("gradients")

        def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
            received.append("step")

        def setup(self, context: TrainingContext) -> None:
            received.append("setup")

    strategy = GradientClippingOptimizerStrategy(Listening(lr=0.1))
    strategy.setup(context)
    optimizer = strategy.create_optimizer(nn.Linear(1, 1), context)
    strategy.on_gradients(optimizer, context)
    strategy.on_optimizer_step(optimizer, context)
    assert received == ["setup", "gradients", "step"]


def test_a_clipping_limit_of_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match="max_norm: expected a number above 0"):
        GradientClippingOptimizerStrategy(SGDOptimizerStrategy(), max_norm=0)


def test_the_repr_of_an_optimizer_strategy_shows_its_settings() -> None:
    groups = ParameterGroupOptimizerStrategy(torch.optim.SGD, _groups, momentum=0.9)
    clipped = GradientClippingOptimizerStrategy(AdamOptimizerStrategy(lr=0.1), max_norm=0.5)
    assert repr(groups) == "ParameterGroupOptimizerStrategy(SGD, _groups, momentum=0.9)"
    assert repr(clipped) == (
        "GradientClippingOptimizerStrategy(base_strategy=AdamOptimizerStrategy(lr=0.1), max_norm=0.5)"
    )


def _groups(model: nn.Module) -> list[dict[str, object]]:
    return [{"params": list(model.parameters())}]
