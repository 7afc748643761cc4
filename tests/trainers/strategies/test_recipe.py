"""Values that are accepted in place of a strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from dovetail import Epochs, Trainer
from dovetail.callbacks import GradientClipping
from dovetail.errors import ConfigError, DataError, UnknownNameError
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
    GradientClippingOptimizerStrategy,
    GradientClippingStepStrategy,
    MSELossStrategy,
    NoOpUpdateStrategy,
    NoSchedulerStrategy,
    SGDOptimizerStrategy,
    StateTrackingUpdateStrategy,
    StepLRSchedulerStrategy,
)
from dovetail.trainers.strategies.bundle import ROLES

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
def test_a_strategy_object_is_kept_and_a_class_or_name_is_instantiated(coerce: Any, strategy: Any) -> None:
    instance = strategy()
    assert coerce(instance) is instance
    assert type(coerce(strategy)) is strategy
    assert type(coerce(strategy.__name__)) is strategy


@pytest.mark.parametrize(("coerce", "strategy"), KINDS)
def test_an_object_that_is_not_a_strategy_is_rejected(coerce: Any, strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"_strategy: expected .* got 3"):
        coerce(3)


@pytest.mark.parametrize(("coerce", "strategy"), KINDS)
def test_a_strategy_of_the_wrong_kind_is_rejected(coerce: Any, strategy: Any) -> None:
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
def test_an_unknown_name_suggests_the_nearest(coerce: Any, name: str, nearest: str) -> None:
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
def test_the_loss_of_a_classifier_is_recognized(loss: Any, classifies: bool) -> None:
    assert as_loss_strategy(loss).is_classification is classifies


def test_an_optimizer_by_name_uses_the_rate_of_the_configuration(context: TrainingContext) -> None:
    context.config["lr"] = 0.5
    optimizer = as_optimizer_strategy("Adagrad").create_optimizer(nn.Linear(1, 1), context)
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.Adagrad, 0.5)


def test_an_optimizer_object_is_kept(context: TrainingContext) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert as_optimizer_strategy(optimizer).create_optimizer(model, context) is optimizer


def test_a_callable_that_returns_no_optimizer_is_rejected(context: TrainingContext) -> None:
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


def test_an_update_strategy_may_be_a_function_of_the_context(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    updates: list[int] = []
    train(
        problem.model(),
        problem.batches[:3],
        model_update_strategy=lambda context: updates.append(context.progress.updates),
    )
    assert updates == [1, 2, 3]


def test_a_list_of_update_strategies_is_a_composite() -> None:
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


def test_a_testing_strategy_may_be_a_function(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    trainer = train(problem.model(), problem.batches, testing_strategy=lambda *test: 0.25)
    assert trainer.test((problem.x, problem.y)) == 0.25


# ---------------------------------------------------------------------- options


def test_a_plain_trainer_has_a_strategy_for_every_role(problem: Problem) -> None:
    strategies = Trainer(problem.model(), verbose=False).strategies
    assert not strategies.given
    assert [role for role in ROLES if getattr(strategies, role) is None] == ["testing"]


@pytest.mark.parametrize(
    ("name", "option"),
    [("criterion", "loss_function"), ("optimizer", "optim_function"), ("scheduler", "lr_scheduler")],
)
def test_an_option_under_both_of_its_names_is_rejected(name: str, option: str) -> None:
    given: dict[str, Any] = {name: lambda *_: None, option: lambda *_: None}
    with pytest.raises(ConfigError, match=f"{option}: {name} is another name of it"):
        Trainer(nn.Linear(1, 1), verbose=False, **given)


CLIPPED: dict[str, dict[str, Any]] = {
    "option": {"gradient_clip": 0.01},
    "step": {"training_step_strategy": GradientClippingStepStrategy(0.01)},
    "optimizer": {"optimizer_strategy": GradientClippingOptimizerStrategy(SGDOptimizerStrategy(0.5), 0.01)},
    "callback": {"callbacks": [GradientClipping(max_norm=0.01)]},
}


@pytest.mark.parametrize("way", CLIPPED)
def test_every_way_to_clip_gives_equal_bits(way: str, problem: Problem) -> None:
    settings = dict(CLIPPED[way])
    settings.setdefault("optimizer_strategy", SGDOptimizerStrategy(0.5))
    trainer = Trainer(problem.model(), "cpu", verbose=False, **settings)
    trainer.fit(problem.batches, max_length=Epochs(1))
    by_hand = problem.model()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for x, y in problem.batches:
        optimizer.zero_grad()
        functional.cross_entropy(by_hand(x), y).backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.01)
        optimizer.step()
    assert_same_weights(trainer.core.model, by_hand)


class _Scaled(nn.Module):
    """Cross entropy of logits times a factor that is learned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.factor * outputs, targets)


def test_learned_state_of_a_criterion_is_in_checkpoints(problem: Problem, tmp_path: Path) -> None:
    def make() -> Trainer:
        model, criterion = problem.model(), _Scaled()
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.5)
        return Trainer(model, "cpu", criterion=criterion, optimizer=optimizer, verbose=False, checkpoint_dir=tmp_path)

    first, resumed, whole = make(), make(), make()
    first.fit(problem.batches, max_length=Epochs(1))
    resumed.fit(problem.batches, max_length=Epochs(2), resume="auto")
    whole.fit(problem.batches, max_length=Epochs(2))
    assert_same_weights(resumed.model, whole.model)
    assert resumed.criterion.factor.item() == whole.criterion.factor.item() != 1.0


def test_a_torch_loss_without_targets_raises_a_one_sentence_error() -> None:
    trainer = Trainer(nn.Linear(2, 2), "cpu", criterion=nn.MSELoss(), verbose=False)
    with pytest.raises(DataError, match="the batch has no targets"):
        trainer.fit([torch.zeros(4, 2)], max_length=Epochs(1))


def test_a_loss_that_ignores_targets_needs_none() -> None:
    trainer = Trainer(nn.Linear(2, 2), "cpu", criterion=lambda outputs, _: outputs.square().mean(), verbose=False)
    trainer.fit([torch.ones(4, 2)], max_length=Epochs(2))
    assert trainer.history.losses[1] < trainer.history.losses[0]
