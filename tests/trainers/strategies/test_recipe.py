"""What is accepted in place of a strategy, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.recipe import as_strategy
from dovetail.trainers.schedules import Triangular
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    AdamWOptimizerStrategy,
    CompositeLossStrategy,
    CompositeUpdateStrategy,
    CrossEntropyLossStrategy,
    DefaultDataLoaderStrategy,
    DefaultTestingStrategy,
    DefaultTrainingStepStrategy,
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    MSELossStrategy,
    NoOpUpdateStrategy,
    NoSchedulerStrategy,
    StateTrackingUpdateStrategy,
    StepLRSchedulerStrategy,
)

as_loader_strategy = partial(as_strategy, "data_loader")
as_loss_strategy = partial(as_strategy, "loss")
as_optimizer_strategy = partial(as_strategy, "optimizer")
as_scheduler_strategy = partial(as_strategy, "lr_scheduler")
as_step_strategy = partial(as_strategy, "training_step")
as_testing_strategy = partial(as_strategy, "testing")
as_update_strategy = partial(as_strategy, "model_update")

KINDS = [
    (as_loss_strategy, CrossEntropyLossStrategy),
    (as_optimizer_strategy, AdamOptimizerStrategy),
    (as_step_strategy, DefaultTrainingStepStrategy),
    (as_scheduler_strategy, NoSchedulerStrategy),
    (as_update_strategy, NoOpUpdateStrategy),
    (as_loader_strategy, DefaultDataLoaderStrategy),
    (as_testing_strategy, DefaultTestingStrategy),
]


@pytest.mark.parametrize(("coerce", "strategy"), KINDS)
def test_a_strategy_stays_itself_and_a_class_or_its_name_makes_one(coerce: Any, strategy: Any) -> None:
    instance = strategy()
    assert coerce(instance) is instance
    assert type(coerce(strategy)) is strategy
    assert type(coerce(strategy.__name__)) is strategy


@pytest.mark.parametrize(("coerce", "strategy"), KINDS)
def test_what_is_no_strategy_is_refused(coerce: Any, strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"_strategy: expected .* got 3"):
        coerce(3)


@pytest.mark.parametrize(("coerce", "strategy"), KINDS)
def test_a_strategy_of_another_kind_is_refused(coerce: Any, strategy: Any) -> None:
    other = StepLRSchedulerStrategy() if coerce is not as_scheduler_strategy else AdamOptimizerStrategy()
    with pytest.raises(ConfigError, match=f"got the {other.role} strategy"):
        coerce(other)


@pytest.mark.parametrize(
    ("coerce", "name", "nearest"),
    [
        (as_loss_strategy, "CrossEntropyLos", "CrossEntropyLoss"),
        (as_optimizer_strategy, "Adamm", "Adam"),
        (as_step_strategy, "GradientClippingStep", "GradientClippingStepStrategy"),
        (as_scheduler_strategy, "StepLRR", "StepLR"),
        (as_update_strategy, "NoOpUpdate", "NoOpUpdateStrategy"),
        (as_loader_strategy, "ShuffleDataLoader", "ShuffleDataLoaderStrategy"),
        (as_testing_strategy, "DefaultTesting", "DefaultTestingStrategy"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(coerce: Any, name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{nearest}'"):
        coerce(name)


@pytest.mark.parametrize(
    "loss", [functional.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss, "CrossEntropyLoss"]
)
@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.AdamW, lr=0.02), AdamWOptimizerStrategy(0.02), lambda p: torch.optim.AdamW(p, lr=0.02)],
)
def test_every_spelling_trains_the_same_model(
    loss: Any, optimizer: Any, problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model, by_hand = problem.model(), problem.model()
    train(model, problem.batches, loss_strategy=loss, optimizer_strategy=optimizer)
    train_by_hand(by_hand, problem.batches, torch.optim.AdamW(by_hand.parameters(), lr=0.02))
    assert_same_weights(model, by_hand)


def test_a_list_of_losses_is_their_sum(context: TrainingContext) -> None:
    strategy = as_loss_strategy([functional.mse_loss, (MSELossStrategy("sum"), 0.5)])
    assert isinstance(strategy, CompositeLossStrategy)
    assert strategy.compute_loss(torch.ones(2), torch.zeros(2), context).item() == 2.0


@pytest.mark.parametrize(
    ("loss", "classifies"),
    [
        (functional.cross_entropy, True),
        ("NLLLoss", True),
        (nn.MSELoss(), False),
        ([functional.mse_loss, CrossEntropyLossStrategy], True),
    ],
)
def test_the_loss_of_a_classifier_is_known_as_such(loss: Any, classifies: bool) -> None:
    assert as_loss_strategy(loss).is_classification is classifies


def test_an_optimizer_by_name_has_the_rate_of_the_configuration(context: TrainingContext) -> None:
    context.config["lr"] = 0.5
    optimizer = as_optimizer_strategy("Adagrad").create_optimizer(nn.Linear(1, 1), context)
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.Adagrad, 0.5)


def test_an_optimizer_stays_itself(context: TrainingContext) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert as_optimizer_strategy(optimizer).create_optimizer(model, context) is optimizer


def test_a_callable_that_makes_no_optimizer_is_refused(context: TrainingContext) -> None:
    with pytest.raises(ConfigError, match="returns an optimizer"):
        as_optimizer_strategy(list).create_optimizer(nn.Linear(1, 1), context)


def test_a_step_may_be_a_function(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    def step(
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Callable[..., torch.Tensor],
        context: TrainingContext,
    ) -> torch.Tensor:
        return loss_criterion(model(examples), labels)

    model, by_hand = problem.model(), problem.model()
    train(model, problem.batches, training_step_strategy=step)
    train_by_hand(by_hand, problem.batches, torch.optim.SGD(by_hand.parameters(), lr=0.01))
    assert_same_weights(model, by_hand)


def test_a_list_of_steps_is_nested() -> None:
    outer, inner = GradientAccumulationStepStrategy(4), GradientClippingStepStrategy()
    assert as_step_strategy([outer, inner]) is outer
    assert outer.base_strategy is inner


@pytest.mark.parametrize(
    ("scheduler", "interval"),
    [
        (partial(StepLR, step_size=3), "epoch"),
        (partial(OneCycleLR, max_lr=1.0, total_steps=9), "update"),
        (Triangular(stepsize=4), "update"),
        ("ReduceLROnPlateau", "epoch"),
    ],
)
def test_a_scheduler_has_the_interval_of_its_kind(scheduler: Any, interval: str, context: TrainingContext) -> None:
    strategy = as_scheduler_strategy(scheduler)
    strategy.create_scheduler(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9), context)
    assert strategy.interval == interval


def test_a_scheduler_by_callable_steps_in_a_run(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    scheduler = partial(StepLR, step_size=2, gamma=0.5)
    trainer = train(problem.model(), problem.batches, epochs=4, lr_scheduler_strategy=scheduler)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0025


def test_a_plateau_by_callable_sees_the_validation_loss(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    trainer = train(
        problem.model(), problem.batches, problem.batches[:2], epochs=2, lr_scheduler_strategy=ReduceLROnPlateau
    )
    assert trainer.context.schedulers[0].scheduler.best == trainer.context.run.validation["valid_loss"]


def test_an_update_may_be_a_function_of_the_context(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    updates: list[int] = []
    train(
        problem.model(),
        problem.batches[:3],
        model_update_strategy=lambda context: updates.append(context.progress.updates),
    )
    assert updates == [1, 2, 3]


def test_a_list_of_updates_is_a_composite() -> None:
    strategy = as_update_strategy([StateTrackingUpdateStrategy, print])
    assert isinstance(strategy, CompositeUpdateStrategy)
    assert len(strategy.strategies) == 2


def test_a_loader_may_be_a_function(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    trainer = train(
        problem.model(),
        (problem.x, problem.y),
        data_loader_strategy=lambda trainset, sampler, batch_size, context: problem.batches[:5],
    )
    assert trainer.context.progress.batches == 5


def test_a_test_may_be_a_function(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    trainer = train(problem.model(), problem.batches, testing_strategy=lambda *test: 0.25)
    assert trainer.test((problem.x, problem.y)) == 0.25
