"""Loss strategies against the losses of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand
from torch import nn
from torch.nn import functional

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    BCEWithLogitsLossStrategy,
    CompositeLossStrategy,
    CrossEntropyLossStrategy,
    DefaultLossCriterionStrategy,
    L2RegularizationStrategy,
    LossCriterionStrategy,
    MSELossStrategy,
    NLLLossStrategy,
)

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0], [2.0, 2.0, 2.0]])
CLASSES = torch.tensor([0, 1, 2])
WEIGHT = torch.tensor([1.0, 2.0, 0.5])
PAIRS = [
    (CrossEntropyLossStrategy(), nn.CrossEntropyLoss(), CLASSES),
    (
        CrossEntropyLossStrategy(WEIGHT, 0.1, "sum", ignore_index=1),
        nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1, reduction="sum", ignore_index=1),
        CLASSES,
    ),
    (MSELossStrategy("sum"), nn.MSELoss(reduction="sum"), LOGITS.flip(0)),
    (
        BCEWithLogitsLossStrategy(WEIGHT, "sum", pos_weight=2 * WEIGHT),
        nn.BCEWithLogitsLoss(WEIGHT, reduction="sum", pos_weight=2 * WEIGHT),
        torch.eye(3),
    ),
    (NLLLossStrategy(WEIGHT, "sum", 2), nn.NLLLoss(WEIGHT, reduction="sum", ignore_index=2), CLASSES),
]


@pytest.mark.parametrize(("strategy", "criterion", "labels"), PAIRS)
def test_a_loss_strategy_computes_the_loss_of_torch(
    strategy: LossCriterionStrategy, criterion: nn.Module, labels: torch.Tensor, context: TrainingContext
) -> None:
    assert torch.equal(strategy.compute_loss(LOGITS, labels, context), criterion(LOGITS, labels))


def test_binary_cross_entropy_takes_integer_labels(context: TrainingContext) -> None:
    labels = torch.eye(3, dtype=torch.int64)
    expected = functional.binary_cross_entropy_with_logits(LOGITS, torch.eye(3))
    assert torch.equal(BCEWithLogitsLossStrategy().compute_loss(LOGITS, labels, context), expected)


def test_class_weights_move_to_the_device_of_the_outputs_once(context: TrainingContext) -> None:
    strategy = CrossEntropyLossStrategy(weight=WEIGHT)
    strategy.compute_loss(LOGITS.to("meta"), CLASSES.to("meta"), context)
    moved = strategy.weight
    strategy.compute_loss(LOGITS.to("meta"), CLASSES.to("meta"), context)
    assert moved is not None
    assert moved.is_meta
    assert strategy.weight is moved


def test_a_composite_loss_is_the_weighted_sum_of_its_parts(context: TrainingContext) -> None:
    labels = torch.eye(3)
    composite = CompositeLossStrategy([MSELossStrategy(), (BCEWithLogitsLossStrategy(), 0.5)])
    expected = nn.MSELoss()(LOGITS, labels) + 0.5 * nn.BCEWithLogitsLoss()(LOGITS, labels)
    assert torch.equal(composite.compute_loss(LOGITS, labels, context), expected)


def test_an_empty_composite_loss_is_rejected() -> None:
    with pytest.raises(ConfigError, match="at least one loss"):
        CompositeLossStrategy([])


def test_l2_sums_the_squares_of_trainable_parameters_only(context: TrainingContext) -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 2.0)
    nn.init.constant_(model.bias, 5.0)
    model.bias.requires_grad_(False)
    context.model = model
    loss = L2RegularizationStrategy(0.5).compute_loss(None, None, context)
    loss.backward()
    assert loss.item() == 4.0
    assert torch.equal(model.weight.grad, model.weight)


def test_l2_in_a_composite_loss_equals_weight_decay(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    model, by_hand = problem.model(dtype=torch.float64), problem.model(dtype=torch.float64)
    data = [(x.double(), y) for x, y in problem.batches]
    train(
        model,
        data,
        loss_strategy=CompositeLossStrategy([CrossEntropyLossStrategy(), L2RegularizationStrategy(0.05)]),
        optimizer_strategy=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    train_by_hand(by_hand, data, torch.optim.SGD(by_hand.parameters(), lr=0.1, weight_decay=0.1))
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_default_loss_is_cross_entropy(context: TrainingContext) -> None:
    loss = DefaultLossCriterionStrategy().compute_loss(LOGITS, CLASSES, context)
    assert torch.equal(loss, functional.cross_entropy(LOGITS, CLASSES))


def test_the_default_loss_follows_the_configuration_of_each_run(context: TrainingContext) -> None:
    strategy = DefaultLossCriterionStrategy()
    context.config = {"loss_criterion": "L1Loss", "parameters": {"loss_criterion": {"reduction": "sum"}}}
    first = strategy.compute_loss(LOGITS, torch.zeros(3, 3), context)
    context.config = {"loss_criterion": "MSELoss"}
    strategy.on_train_start(context)
    assert first == LOGITS.abs().sum()
    assert strategy.compute_loss(LOGITS, torch.zeros(3, 3), context) == LOGITS.square().mean()


def test_an_unknown_loss_in_the_configuration_suggests_the_nearest(context: TrainingContext) -> None:
    context.config = {"loss_criterion": "MSLoss"}
    with pytest.raises(UnknownNameError, match="did you mean 'MSELoss'"):
        DefaultLossCriterionStrategy().compute_loss(LOGITS, LOGITS, context)


def test_the_state_of_a_loss_module_is_saved() -> None:
    kept = DefaultLossCriterionStrategy(nn.CrossEntropyLoss(WEIGHT)).state_dict()
    criterion = nn.CrossEntropyLoss(torch.ones(3))
    DefaultLossCriterionStrategy(criterion).load_state_dict(kept)
    assert torch.equal(criterion.weight, WEIGHT)


def test_training_with_a_loss_strategy_equals_a_hand_written_loop(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model, by_hand = problem.model(), problem.model()
    train(model, problem.batches, loss_strategy=CrossEntropyLossStrategy())
    train_by_hand(by_hand, problem.batches, torch.optim.SGD(by_hand.parameters(), lr=0.01))
    assert_same_weights(model, by_hand)
