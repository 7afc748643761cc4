"""Per-FedAvg: meta-learning of a model that fits a client after one local step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.data import batch_length
from dovetail.data.batches import slice_batch
from dovetail.errors import expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.own_model import WithWeights
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.training_step import Criterion, NestingStepStrategy


@dataclass(eq=False, repr=False)
class PerFedAvgStepStrategy(NestingStepStrategy):
    """A step with the gradient of f at w' = w − α ∇f(w), each on different samples (first-order MAML).

    Every batch is divided: ∇f(w) uses its first half, and the loss at w' its second half. So one batch is still one
    update. A batch of one sample serves as both halves. β is the learning rate of the optimizer. In the
    personalization round the step is a plain one, because a client then adapts the model to its data.

    It has the arguments of `PerFedAvg`, and `base_strategy`, the step for each half (None for a plain one).

    Example:
        >>> PerFedAvgStepStrategy(alpha=0.1)
        PerFedAvgStepStrategy(alpha=0.1)
    """

    alpha: float = 0.01

    def __post_init__(self) -> None:
        expect(self.alpha >= 0, "alpha", "a number that is at least 0", self.alpha)

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of the second half at w', whose gradient is applied to w."""
        if personalizes(context):
            return super().loss(model, optimizer, examples, labels, loss_criterion, context)
        length = batch_length((examples, labels))
        half = length // 2
        first = slice_batch(examples, 0, half or 1, length), slice_batch(labels, 0, half or 1, length)
        second = slice_batch(examples, half, length, length), slice_batch(labels, half, length, length)
        with context.run.detached():
            # Terms of the shared model, such as a proximal term, do not belong to the adaptation of a client.
            before = super().loss(model, optimizer, first[0], first[1], loss_criterion, context)
        adapted = WithWeights(model, self._adapted(model, before, context))
        # The loss is the mean over the second half.
        context.run.num_items = length - half
        return super().loss(adapted, optimizer, second[0], second[1], loss_criterion, context)

    def _adapted(self, model: nn.Module, loss: Tensor, context: TrainingContext) -> dict[str, Tensor]:
        """Return w', whose difference to w is constant."""
        parameters = {name: it for name, it in model.named_parameters() if it.requires_grad}
        scaler = None if context.precision is None else context.precision.scaler
        # Without scaling of the loss, small gradients vanish in half precision.
        loss = loss if scaler is None else scaler.scale(loss)
        rate = self.alpha / (1.0 if scaler is None else scaler.get_scale())
        slopes = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {
            name: parameter if slope is None else parameter - rate * slope
            for (name, parameter), slope in zip(parameters.items(), slopes, strict=True)
        }


@dataclass(eq=False, repr=False)
class PerFedAvg(StrategyAlgorithm):
    """FedAvg on F_k(w) = f_k(w − α ∇f_k(w)), with first-order gradients (Fallah, Mokhtari, Ozdaglar, 2020).

    Args:
        alpha: α, the rate of the local step, at least 0; β is the learning rate of the client's optimizer.

    Example:
        >>> PerFedAvg(alpha=0.1)
        PerFedAvg(alpha=0.1)
    """

    alpha: float = 0.01

    decides = ("how a batch is computed",)
    client_strategies: ClassVar = {"training_step": PerFedAvgStepStrategy}
