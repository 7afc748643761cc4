"""Per-FedAvg: a model that is good after one step of a client's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.data import batch_length
from dovetail.data.batches import slice_batch
from dovetail.errors import expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.own_model import WithWeights
from dovetail.federated.personalization import personalizes
from dovetail.trainers.strategies.training_step import Criterion, NestingStepStrategy

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

__all__ = ["PerFedAvg", "PerFedAvgStepStrategy"]


@dataclass(eq=False, repr=False)
class PerFedAvgStepStrategy(NestingStepStrategy):
    """A step with the gradient of f at w' = w − α ∇f(w), where both are of different samples (first-order MAML).

    Every batch is cut in two: ∇f(w) is of its first half, the loss and its gradient at w' are of the second. So one
    batch is one update, as everywhere, and accumulation, schedules and counts of updates mean what they always do. A
    batch of one sample serves as both. β is the rate of the optimizer.

    In the personalisation round the step is a plain one: a client adapts the model to its data.

    Args:
        alpha: α, at least 0; 0 is a plain step on the second halves.
        base_strategy: The step that is made of each half; None for a plain one.

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
        """Return the loss of the second half at w', which is differentiated as if at w."""
        if personalizes(context):
            return super().loss(model, optimizer, examples, labels, loss_criterion, context)
        length = batch_length((examples, labels))
        half = length // 2
        first = slice_batch(examples, 0, half or 1, length), slice_batch(labels, 0, half or 1, length)
        second = slice_batch(examples, half, length, length), slice_batch(labels, half, length, length)
        with context.run.personally():
            # What belongs to the model that is sent is no part of a client's adaptation.
            before = super().loss(model, optimizer, first[0], first[1], loss_criterion, context)
        adapted = WithWeights(model, self._adapted(model, before, context))
        # What the loss is a mean of.
        context.run.num_items = length - half
        return super().loss(adapted, optimizer, second[0], second[1], loss_criterion, context)

    def _adapted(self, model: nn.Module, loss: Tensor, context: TrainingContext) -> dict[str, Tensor]:
        """Return w' of w, a constant away from it."""
        parameters = {name: it for name, it in model.named_parameters() if it.requires_grad}
        scaler = None if context.precision is None else context.precision.scaler
        # Small gradients of half precision are nothing, unless the loss is scaled.
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
        alpha: α, the rate of the step that a client would adapt the model by; β is the rate of its optimizer.

    Example:
        >>> PerFedAvg(alpha=0.1)
        PerFedAvg(alpha=0.1)
    """

    alpha: float = 0.01

    decides = ("how a batch is computed",)
    client_strategies: ClassVar = {"training_step": PerFedAvgStepStrategy}
