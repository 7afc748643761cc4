"""Losses with a penalty that depends on the weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.anchored import Anchored, Weights, copy_tensors, model_parameters
from dovetail.trainers.strategies.base import LossCriterionStrategy, Strategy
from dovetail.trainers.strategies.loss_criterion import DefaultLossCriterionStrategy
from dovetail.trainers.strategies.nesting import Nesting


def sent_parameters(context: TrainingContext) -> dict[str, Tensor]:
    """Return the parameters that a client sends, by name: all except those that stay with it."""
    return {name: value for name, value in model_parameters(context).items() if name not in context.client.local_names}


@dataclass(eq=False, repr=False)
class PenalizedLossStrategy(Anchored, Nesting, LossCriterionStrategy):
    """A loss plus a penalty that depends on the weights and on those at the start of the run.

    The penalty belongs to the model that a client sends: it ignores parameters that stay with the client, and is left
    out while the client's personal model is trained.

    Args:
        base_loss_fn: The loss inside: a strategy, or a callable of outputs and labels. None means the loss of the
            configuration, by default cross entropy.

    Example:
        >>> import torch
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> class Shrinking(PenalizedLossStrategy):
        ...     def penalty(self, weights, anchor):
        ...         return sum(value.abs().sum() for value in weights.values())
        >>> trainer = ComposableTrainer(torch.nn.Linear(2, 2), loss_strategy=Shrinking(), verbose=False)
        >>> _ = trainer.fit((torch.randn(8, 2), torch.zeros(8, dtype=torch.long)))
    """

    base_loss_fn: Any = field(default=None, kw_only=True)

    vectorizes = True

    def __post_init__(self) -> None:
        given = self.base_loss_fn
        self.inner: LossCriterionStrategy = (
            given if isinstance(given, LossCriterionStrategy) else DefaultLossCriterionStrategy(given)
        )

    @abstractmethod
    def penalty(self, weights: Weights, anchor: Any) -> Tensor:
        """Return the penalty, one number, for the parameters of one model and the result of `capture`."""

    def capture(self, context: TrainingContext) -> Any:
        return copy_tensors(sent_parameters(context))

    @property
    def parts(self) -> Sequence[Strategy]:
        return (self.inner,)

    def classifies(self, context: TrainingContext) -> bool:
        return self.inner.classifies(context)

    def criterion(self, context: TrainingContext) -> Callable[[Any, Any], Tensor]:
        """Return the loss inside, plus the penalty in training."""
        inner = self.inner.criterion(context)
        return lambda outputs, labels: self.penalized(inner(outputs, labels), context)

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        return self.penalized(self.inner.compute_loss(outputs, labels, context), context)

    def penalized(self, loss: Tensor, context: TrainingContext) -> Tensor:
        """Return the loss of one model, or of each in a fleet, plus the penalty."""
        # No penalty before the run starts, for the personal model, in validation, and in the personalization round.
        if self.anchor is None or context.run.is_detached or context.stage != "train" or personalizes(context):
            return loss
        return loss + context.client.each(self.penalty, sent_parameters(context), self.anchor)
