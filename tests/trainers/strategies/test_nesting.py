"""Nested strategies: forwarding of hooks and state, and their repr."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from dovetail.errors import CheckpointError, ConfigError
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    CompositeLossStrategy,
    CompositeUpdateStrategy,
    CrossEntropyLossStrategy,
    DefaultLRSchedulerStrategy,
    GradientClippingOptimizerStrategy,
    GradientClippingStepStrategy,
    ModelUpdateStrategy,
    NoOpUpdateStrategy,
    StateTrackingUpdateStrategy,
    WarmupSchedulerStrategy,
)


class Closes(ModelUpdateStrategy):
    def __init__(self, closed: list[int], number: int, fails: bool = False) -> None:
        self.closed, self.number, self.fails = closed, number, fails

    def teardown(self, context: TrainingContext) -> None:
        self.closed.append(self.number)
        if self.fails:
            raise OSError("a file could not be closed")


def test_every_part_is_torn_down_even_if_one_fails(context: TrainingContext) -> None:
    closed: list[int] = []
    composite = CompositeUpdateStrategy([Closes(closed, 1), Closes(closed, 2, fails=True), Closes(closed, 3)])
    with pytest.raises(OSError, match="a file could not be closed"):
        composite.teardown(context)
    assert closed == [3, 2, 1]


def test_a_composite_of_stateless_parts_has_no_state() -> None:
    assert CompositeUpdateStrategy([NoOpUpdateStrategy(), NoOpUpdateStrategy()]).state_dict() == {}


def test_the_state_of_different_parts_is_rejected() -> None:
    state = CompositeUpdateStrategy([StateTrackingUpdateStrategy()]).state_dict()
    with pytest.raises(CheckpointError, match="holds 2 strategies, and the checkpoint has 1"):
        CompositeUpdateStrategy([NoOpUpdateStrategy(), NoOpUpdateStrategy()]).load_state_dict(state)


@pytest.mark.parametrize(
    "nest",
    [
        lambda context: CompositeLossStrategy([(len, 0.5)]),
        lambda context: WarmupSchedulerStrategy(2, 0.0, len),
        lambda context: CompositeUpdateStrategy([len]).setup(context),
        lambda context: GradientClippingOptimizerStrategy(len).setup(context),
        lambda context: GradientClippingStepStrategy(base_strategy=len).setup(context),
    ],
)
def test_an_object_that_is_not_a_strategy_is_rejected_inside_a_composite(nest: Any, context: TrainingContext) -> None:
    with pytest.raises(ConfigError, match=r"Strategy: expected strategies inside, got <built-in function len>"):
        nest(context)


@pytest.mark.parametrize(
    ("strategy", "shown"),
    [
        (AdamOptimizerStrategy(), "AdamOptimizerStrategy()"),
        (AdamOptimizerStrategy(0.1, amsgrad=True), "AdamOptimizerStrategy(lr=0.1, amsgrad=True)"),
        (CrossEntropyLossStrategy(torch.ones(3)), "CrossEntropyLossStrategy(weight=Tensor(3,))"),
        (
            DefaultLRSchedulerStrategy(partial(StepLR, step_size=3), frequency=2),
            "DefaultLRSchedulerStrategy(scheduler_fn=partial(StepLR, step_size=3), frequency=2)",
        ),
        (
            CompositeUpdateStrategy([NoOpUpdateStrategy()]),
            "CompositeUpdateStrategy(strategies=[NoOpUpdateStrategy()])",
        ),
    ],
    ids=repr,
)
def test_the_repr_of_a_strategy_shows_settings_that_are_not_defaults(strategy: object, shown: str) -> None:
    assert repr(strategy) == shown
