"""Learning-rate strategies against the schedulers of torch, alone and in a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from dovetail import Epochs
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.recipe import as_strategy
from dovetail.trainers.schedules import Triangular
from dovetail.trainers.strategies import (
    CosineAnnealingLRSchedulerStrategy,
    CosineAnnealingWarmRestartsSchedulerStrategy,
    DefaultLRSchedulerStrategy,
    ExponentialLRSchedulerStrategy,
    GradientAccumulationStepStrategy,
    LinearLRSchedulerStrategy,
    LRSchedulerStrategy,
    ModelUpdateStrategy,
    MultiStepLRSchedulerStrategy,
    NoSchedulerStrategy,
    PolynomialLRSchedulerStrategy,
    ReduceLROnPlateauSchedulerStrategy,
    SGDOptimizerStrategy,
    StepLRSchedulerStrategy,
    TimmLRSchedulerStrategy,
    WarmupSchedulerStrategy,
)

PAIRS: list[tuple[LRSchedulerStrategy, Callable[[Optimizer], Any]]] = [
    (StepLRSchedulerStrategy(2, 0.5), partial(StepLR, step_size=2, gamma=0.5)),
    (MultiStepLRSchedulerStrategy([1, 4], 0.5), partial(lr_scheduler.MultiStepLR, milestones=[1, 4], gamma=0.5)),
    (ExponentialLRSchedulerStrategy(), partial(lr_scheduler.ExponentialLR, gamma=0.95)),
    (CosineAnnealingLRSchedulerStrategy(5, 0.1), partial(lr_scheduler.CosineAnnealingLR, T_max=5, eta_min=0.1)),
    (
        CosineAnnealingWarmRestartsSchedulerStrategy(2, 2, 0.1),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2, T_mult=2, eta_min=0.1),
    ),
    (LinearLRSchedulerStrategy(), partial(LinearLR, start_factor=1 / 3, total_iters=5)),
    (PolynomialLRSchedulerStrategy(4, 2.0), partial(lr_scheduler.PolynomialLR, total_iters=4, power=2.0)),
]


def sgd(lr: float = 1.0) -> Optimizer:
    return SGD([torch.zeros(1, requires_grad=True)], lr=lr)


def rates(scheduler: Any, step: Callable[[], Any], number: int = 8) -> list[float]:
    seen = []
    for _ in range(number):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        step()
    return seen


def strategy_rates(strategy: LRSchedulerStrategy, context: TrainingContext, number: int = 8) -> list[float]:
    scheduler = strategy.create_scheduler(sgd(), context)
    return rates(scheduler, lambda: strategy.step(scheduler, context), number)


class Watches(ModelUpdateStrategy):
    """Notes the rate after every update."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def after_step(self, context: TrainingContext) -> None:
        self.rates.append(context.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(("strategy", "of_torch"), PAIRS, ids=lambda it: type(it).__name__)
def test_a_scheduler_strategy_changes_the_rate_as_torch_does(
    strategy: Any, of_torch: Any, context: TrainingContext
) -> None:
    scheduler = of_torch(sgd())
    assert strategy_rates(strategy, context) == rates(scheduler, scheduler.step)


def test_without_a_scheduler_the_rate_is_constant(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    trainer = train(problem.model(), problem.batches, epochs=2, lr_scheduler_strategy=NoSchedulerStrategy())
    assert trainer.context.schedulers == []
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01


def test_a_schedule_steps_once_per_epoch_by_default(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    trainer = train(
        problem.model(), problem.batches, epochs=3, lr_scheduler_strategy=ExponentialLRSchedulerStrategy(0.5)
    )
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**3


def test_a_schedule_per_update_with_frequency_two_steps_at_updates_two_four_and_six(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    watches = Watches()
    train(
        problem.model(),
        problem.batches[:10],
        epochs=2,
        optimizer_strategy=SGDOptimizerStrategy(1.0),
        training_step_strategy=GradientAccumulationStepStrategy(4),
        lr_scheduler_strategy=ExponentialLRSchedulerStrategy(0.5, interval="update", frequency=2),
        model_update_strategy=watches,
    )
    assert watches.rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_a_schedule_per_batch_counts_batches(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    trainer = train(
        problem.model(),
        problem.batches[:10],
        optimizer_strategy=SGDOptimizerStrategy(1.0),
        training_step_strategy=GradientAccumulationStepStrategy(4),
        lr_scheduler_strategy=ExponentialLRSchedulerStrategy(0.5, interval="batch"),
    )
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5**10


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"interval": "step"}, "interval: expected 'epoch'"),
        ({"frequency": 0}, "at least 1"),
        ({"frequency": 1.5}, "a whole number"),
    ],
)
def test_an_invalid_interval_is_rejected(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepLRSchedulerStrategy(**keywords)


# By configuration


def test_without_a_configuration_the_default_scheduler_is_none(context: TrainingContext) -> None:
    assert DefaultLRSchedulerStrategy().create_scheduler(sgd(), context) is None


def test_the_default_scheduler_takes_name_and_settings_from_the_configuration(context: TrainingContext) -> None:
    context.config = {"lr_scheduler": "StepLR", "parameters": {"learning_rate": {"step_size": 2, "gamma": 0.5}}}
    assert strategy_rates(DefaultLRSchedulerStrategy(), context, 5) == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_cosine_by_name_ends_with_the_last_epoch(context: TrainingContext) -> None:
    # P-PL-8: the original makes it as long as all batches, and steps it once per epoch.
    context.config = {"lr_scheduler": "CosineAnnealingLR", "epochs": 4}
    assert strategy_rates(DefaultLRSchedulerStrategy(), context, 5)[-1] == pytest.approx(0.0)


def test_an_unknown_scheduler_in_the_configuration_suggests_the_nearest(context: TrainingContext) -> None:
    context.config = {"lr_scheduler": "StepLr"}
    with pytest.raises(UnknownNameError, match="did you mean 'StepLR'"):
        DefaultLRSchedulerStrategy().create_scheduler(sgd(), context)


def test_a_schedule_that_continues_earlier_runs_counts_epochs(context: TrainingContext) -> None:
    context.config = {"lr_scheduler": "ExponentialLR", "global_lr_scheduler": True, "epochs": 2, "epochs_before": 4}
    context.config["parameters"] = {"learning_rate": {"gamma": 0.5}}
    assert DefaultLRSchedulerStrategy().create_scheduler(sgd(), context).get_last_lr() == [0.5**4]
    with pytest.raises(ConfigError, match="global_lr_scheduler: expected interval='epoch', got 'update'"):
        DefaultLRSchedulerStrategy(interval="update").create_scheduler(sgd(), context)


def test_a_cosine_that_continues_earlier_runs_ends_with_the_last_run(context: TrainingContext) -> None:
    context.config = {"lr_scheduler": "CosineAnnealingLR", "global_lr_scheduler": True, "epochs": 2}
    context.config |= {"epochs_before": 4, "total_epochs": 6}
    assert strategy_rates(DefaultLRSchedulerStrategy(), context, 3) == pytest.approx([0.25, 0.0669873, 0.0], abs=1e-6)


def test_the_default_scheduler_calls_its_function_with_the_optimizer(context: TrainingContext) -> None:
    strategy = DefaultLRSchedulerStrategy(partial(StepLR, step_size=1, gamma=0.5))
    assert strategy_rates(strategy, context, 3) == [1.0, 0.5, 0.25]


# Plateaus


def test_a_plateau_sees_the_validation_loss_of_its_epoch(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    seen: list[tuple[float, float]] = []

    class Spies(ReduceLROnPlateauSchedulerStrategy):
        def step(self, scheduler: Any, context: TrainingContext) -> None:
            super().step(scheduler, context)
            seen.append((scheduler.best, context.run.validation["valid_loss"]))

    train(problem.model(), problem.batches, problem.batches[:3], epochs=3, lr_scheduler_strategy=Spies())
    assert len({best for best, _ in seen}) == 3
    assert all(best == loss for best, loss in seen)


def test_a_plateau_lowers_the_rate_after_its_patience(context: TrainingContext) -> None:
    strategy = ReduceLROnPlateauSchedulerStrategy(factor=0.5, patience=1)
    scheduler = strategy.create_scheduler(sgd(), context)
    seen = []
    for epoch in range(4):
        context.progress.batches = context.run.validated_at = epoch
        context.run.validation = {"valid_loss": 1.0}
        strategy.step(scheduler, context)
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
    assert seen == [1.0, 1.0, 0.5, 0.5]


def test_a_plateau_ignores_an_epoch_without_validation(context: TrainingContext) -> None:
    strategy = ReduceLROnPlateauSchedulerStrategy(patience=0)
    scheduler = strategy.create_scheduler(sgd(), context)
    context.run.validation, context.run.validated_at, context.progress.batches = {"valid_loss": 1.0}, 4, 4
    strategy.step(scheduler, context)
    context.progress.batches = 8
    strategy.step(scheduler, context)
    assert scheduler.optimizer.param_groups[0]["lr"] == 1.0
    assert scheduler.num_bad_epochs == 0


def test_a_plateau_without_validation_uses_the_last_training_loss(context: TrainingContext) -> None:
    strategy = ReduceLROnPlateauSchedulerStrategy()
    scheduler = strategy.create_scheduler(sgd(), context)
    context.state["last_loss"] = torch.tensor(0.25)
    strategy.step(scheduler, context)
    assert scheduler.best == 0.25


def test_a_plateau_of_an_unknown_metric_suggests_the_nearest(context: TrainingContext) -> None:
    strategy = ReduceLROnPlateauSchedulerStrategy(monitor="valid_acc")
    context.run.validation = {"valid_accuracy": 0.5}
    with pytest.raises(UnknownNameError, match="did you mean 'valid_accuracy'"):
        strategy.step(strategy.create_scheduler(sgd(), context), context)


# Warm-up


def test_a_warm_up_equals_the_sequential_scheduler_of_torch(context: TrainingContext) -> None:
    strategy = WarmupSchedulerStrategy(3, 0.25, StepLRSchedulerStrategy(2, 0.5))
    optimizer = sgd()
    line, steps = LinearLR(optimizer, 0.25, total_iters=3), StepLR(optimizer, 2, 0.5)
    sequence = SequentialLR(optimizer, [line, steps], milestones=[3])
    assert strategy_rates(strategy, context) == pytest.approx(rates(sequence, sequence.step))


def test_a_warm_up_without_a_base_ends_at_the_rate_of_the_optimizer(context: TrainingContext) -> None:
    assert strategy_rates(WarmupSchedulerStrategy(4, 0.0), context, 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_warm_up_of_zero_steps_is_its_base(context: TrainingContext) -> None:
    base = StepLRSchedulerStrategy(2, 0.5)
    assert strategy_rates(WarmupSchedulerStrategy(0, 0.0, base), context) == strategy_rates(base, context)


def test_a_warm_up_ends_at_the_first_rate_of_its_base(context: TrainingContext) -> None:
    base = LinearLRSchedulerStrategy(0.5, 1.0, 2)
    assert strategy_rates(WarmupSchedulerStrategy(2, 0.0, base), context, 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_warm_up_gives_each_group_its_own_rate(context: TrainingContext) -> None:
    optimizer = SGD([{"params": [torch.zeros(1)], "lr": 1.0}, {"params": [torch.zeros(1)], "lr": 3.0}])
    scheduler = WarmupSchedulerStrategy(2, 1.0).create_scheduler(optimizer, context)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0, 2.0]


def test_a_plateau_after_a_warm_up_receives_its_metric(context: TrainingContext) -> None:
    strategy = WarmupSchedulerStrategy(1, 0.0, ReduceLROnPlateauSchedulerStrategy(factor=0.5, patience=0))
    context.state["last_loss"] = 1.0
    assert strategy_rates(strategy, context, 5) == [0.0, 1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("stop", [2, 5])
def test_a_warm_up_continues_from_its_saved_state(stop: int, context: TrainingContext) -> None:
    # P-PL-16: the original keeps the warm-up's state only.
    strategy = WarmupSchedulerStrategy(3, 0.0, CosineAnnealingLRSchedulerStrategy(4))
    whole = strategy_rates(strategy, context, 8)
    optimizer = sgd()
    first = strategy.create_scheduler(optimizer, context)
    rates(first, lambda: strategy.step(first, context), stop)
    resumed_optimizer = sgd()
    second = strategy.create_scheduler(resumed_optimizer, context)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert rates(second, lambda: strategy.step(second, context), 8 - stop) == whole[stop:]


def test_a_warm_up_rejects_a_base_with_another_interval() -> None:
    with pytest.raises(ConfigError, match="give both the same interval and frequency"):
        WarmupSchedulerStrategy(5, 0.0, StepLRSchedulerStrategy(interval="update"))


def test_a_base_whose_interval_is_known_only_when_built_is_rejected_then(context: TrainingContext) -> None:
    strategy = WarmupSchedulerStrategy(5, 0.0, as_strategy("lr_scheduler", Triangular(stepsize=4)))
    with pytest.raises(ConfigError, match="give both the same interval and frequency"):
        strategy.create_scheduler(sgd(), context)


# In the manner of timm


class CosineInTheMannerOfTimm:
    """A scheduler with timm's two methods: epochs set the rate, updates refine it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.told: list[tuple[str, int]] = []

    def step_update(self, num_updates: int) -> None:
        self.told.append(("update", num_updates))
        self.optimizer.param_groups[0]["lr"] = math.cos(num_updates / 100)

    def step(self, epoch: int) -> None:
        self.told.append(("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        return {"told": len(self.told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = []


def test_a_timm_scheduler_receives_updates_and_epochs(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    trainer = train(
        problem.model(),
        problem.batches[:2],
        epochs=2,
        lr_scheduler_strategy=TimmLRSchedulerStrategy(CosineInTheMannerOfTimm),
    )
    told = trainer.context.schedulers[0].scheduler.told
    assert told == [("update", 1), ("update", 2), ("epoch", 1), ("update", 3), ("update", 4), ("epoch", 2)]
    assert trainer.optimizer.param_groups[0]["lr"] == math.cos(0.04)


def test_the_repr_of_a_scheduler_strategy_shows_its_settings() -> None:
    strategy = WarmupSchedulerStrategy(2, 0.1, CosineAnnealingLRSchedulerStrategy(T_max=50))
    assert repr(strategy) == (
        "WarmupSchedulerStrategy(warmup_epochs=2, warmup_start_lr=0.1, "
        "base_scheduler=CosineAnnealingLRSchedulerStrategy(T_max=50))"
    )


def test_a_run_split_in_two_has_the_rates_of_one_run(problem: Problem, tmp_path: Path) -> None:
    def trainer() -> ComposableTrainer:
        strategy = WarmupSchedulerStrategy(2, 0.0, StepLRSchedulerStrategy(1, 0.5))
        return ComposableTrainer(problem.model(), verbose=False, lr_scheduler_strategy=strategy)

    whole, first, second = trainer(), trainer(), trainer()
    whole.fit(problem.batches, max_length=Epochs(5))
    first.fit(problem.batches, max_length=Epochs(3))
    first.save_checkpoint(tmp_path / "half")
    second.load_checkpoint(tmp_path / "half")
    second.fit(problem.batches, max_length=Epochs(5))
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**3
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_custom_scheduler_strategy_needs_one_method(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    class Halves(LRSchedulerStrategy):
        def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> Any:
            return lr_scheduler.ExponentialLR(optimizer, 0.5)

    trainer = train(nn.Sequential(problem.model()), problem.batches, lr_scheduler_strategy=Halves())
    assert trainer.optimizer.param_groups[0]["lr"] == 0.005
