"""Loss strategies: cross entropy, squared error, weighted sums of losses, and losses of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail.errors import ConfigError
from dovetail.trainers.catalog import classifies, losses
from dovetail.trainers.strategies.base import LossCriterionStrategy, Strategy
from dovetail.trainers.strategies.nesting import Described, Nesting

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


Reduction = Literal["mean", "sum", "none"]
LossFunction = Callable[[Any, Any], Tensor]


@dataclass(eq=False, repr=False)
class DefaultLossCriterionStrategy(Described, LossCriterionStrategy):
    """The given loss, or else the loss that the configuration names.

    Args:
        loss_fn: A callable of outputs and labels. None means `config["loss_criterion"]`, a registered name, with the
            arguments `config["parameters"]["loss_criterion"]`; without one, cross entropy.

    Example:
        >>> DefaultLossCriterionStrategy(nn.L1Loss()).compute_loss(torch.ones(2), torch.zeros(2), context=None)
        tensor(1.)
    """

    loss_fn: LossFunction | None = None
    _criterion: LossFunction | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.is_classification = self.loss_fn is None or classifies(self.loss_fn)

    def on_train_start(self, context: TrainingContext) -> None:
        """Forget the loss of the last run: another run may have another configuration."""
        self._criterion = None

    def criterion(self, context: TrainingContext) -> LossFunction:
        """Return the given loss itself, if there is one: a wrapper would add a Python call to every step."""
        is_plain = type(self).compute_loss is DefaultLossCriterionStrategy.compute_loss
        return self.loss_fn if self.loss_fn is not None and is_plain else super().criterion(context)

    def classifies(self, context: TrainingContext) -> bool:
        """Return whether the given or configured loss is a classification loss."""
        if self.loss_fn is not None:
            return classifies(self.loss_fn)
        kind = losses.get(context.config.get("loss_criterion", "CrossEntropyLoss"))
        return classifies(kind if isinstance(kind, type) else _configured(context.config))

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the loss of one batch."""
        if self._criterion is None:
            self._criterion = self.loss_fn or _configured(context.config)
            self.is_classification = classifies(self._criterion)
            # A loss of the configuration is built here, after the trainer has moved its criterion to the device.
            if isinstance(self._criterion, nn.Module) and isinstance(outputs, Tensor):
                self._criterion.to(outputs.device)
        return self._criterion(outputs, labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a loss that is a module."""
        return self.loss_fn.state_dict() if isinstance(self.loss_fn, nn.Module) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.load_state_dict(dict(state))


@dataclass(eq=False, repr=False)
class CrossEntropyLossStrategy(Described, LossCriterionStrategy):
    """Cross entropy of logits and classes, as `torch.nn.CrossEntropyLoss` computes it.

    Args:
        weight: A weight for each class.
        label_smoothing: The share of the target that is spread over all classes.
        reduction: `mean`, `sum` or `none`. Accumulation is exact for `mean`.
        ignore_index: The label to ignore.

    Example:
        >>> strategy = CrossEntropyLossStrategy(label_smoothing=0.1)
        >>> strategy.compute_loss(torch.zeros(1, 4), torch.tensor([2]), context=None)
        tensor(1.3863)
    """

    is_classification = True

    weight: Tensor | None = None
    label_smoothing: float = 0.0
    reduction: Reduction = "mean"
    ignore_index: int = -100

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the loss of one batch."""
        self.weight = _on_device_of(outputs, self.weight)
        return functional.cross_entropy(
            outputs,
            labels,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


@dataclass(eq=False, repr=False)
class MSELossStrategy(Described, LossCriterionStrategy):
    """The mean squared error.

    Example:
        >>> MSELossStrategy().compute_loss(torch.tensor([1.0, 3.0]), torch.zeros(2), context=None)
        tensor(5.)
    """

    reduction: Reduction = "mean"

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the loss of one batch."""
        return functional.mse_loss(outputs, labels, reduction=self.reduction)


@dataclass(eq=False, repr=False)
class BCEWithLogitsLossStrategy(Described, LossCriterionStrategy):
    """Binary cross entropy of logits; labels may be integers.

    Args:
        weight: A weight for each element of a batch.
        reduction: `mean`, `sum` or `none`.
        pos_weight: A weight for the positive examples of each class.

    Example:
        >>> BCEWithLogitsLossStrategy().compute_loss(torch.zeros(2), torch.tensor([0, 1]), context=None)
        tensor(0.6931)
    """

    weight: Tensor | None = None
    reduction: Reduction = "mean"
    pos_weight: Tensor | None = None

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the loss of one batch."""
        self.weight, self.pos_weight = _on_device_of(outputs, self.weight), _on_device_of(outputs, self.pos_weight)
        return functional.binary_cross_entropy_with_logits(
            outputs,
            labels if labels.is_floating_point() else labels.to(outputs.dtype),
            self.weight,
            reduction=self.reduction,
            pos_weight=self.pos_weight,
        )


@dataclass(eq=False, repr=False)
class NLLLossStrategy(Described, LossCriterionStrategy):
    """The negative log likelihood, of outputs that are log probabilities.

    Args:
        weight: A weight for each class.
        reduction: `mean`, `sum` or `none`.
        ignore_index: The label to ignore.

    Example:
        >>> NLLLossStrategy().compute_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([1]), context=None)
        tensor(2.)
    """

    is_classification = True

    weight: Tensor | None = None
    reduction: Reduction = "mean"
    ignore_index: int = -100

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the loss of one batch."""
        self.weight = _on_device_of(outputs, self.weight)
        return functional.nll_loss(
            outputs, labels, self.weight, ignore_index=self.ignore_index, reduction=self.reduction
        )


@dataclass(eq=False, repr=False)
class CompositeLossStrategy(Nesting, LossCriterionStrategy):
    """A weighted sum of losses.

    Args:
        strategies: Losses, or pairs of a loss and its weight; the default weight is 1. The attribute holds pairs.

    Example:
        >>> strategy = CompositeLossStrategy([MSELossStrategy(), (MSELossStrategy("sum"), 0.1)])
        >>> strategy.compute_loss(torch.ones(2), torch.zeros(2), context=None)
        tensor(1.2000)
    """

    strategies: Sequence[LossCriterionStrategy | tuple[LossCriterionStrategy, float]]

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ConfigError("CompositeLossStrategy: expected at least one loss, got none")
        self._weighted = [it if isinstance(it, tuple) else (it, 1.0) for it in self.strategies]
        self.strategies = self._weighted
        self.check_parts()
        self.is_classification = any(strategy.is_classification for strategy, _ in self._weighted)

    def classifies(self, context: TrainingContext) -> bool:
        """Return whether any of the losses is a classification loss."""
        return any(strategy.classifies(context) for strategy, _ in self._weighted)

    @property
    def parts(self) -> Sequence[Strategy]:
        """The losses."""
        return [strategy for strategy, _ in self._weighted]

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the loss of one batch."""
        (first, weight), *others = self._weighted
        total = weight * first.compute_loss(outputs, labels, context)
        for strategy, weight in others:
            total = total + weight * strategy.compute_loss(outputs, labels, context)
        return total


@dataclass(frozen=True, eq=False, repr=False)
class L2RegularizationStrategy(Described, LossCriterionStrategy):
    """The sum of all squared trainable parameters, times a weight; use it in a `CompositeLossStrategy`.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 3.0)
        >>> L2RegularizationStrategy(weight=0.5).compute_loss(None, None, TrainingContext(model))
        tensor(9., grad_fn=<MulBackward0>)
    """

    weight: float = 0.01

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the penalty; it does not depend on the batch."""
        assert context.model is not None
        squares = [parameter.square().sum() for parameter in context.model.parameters() if parameter.requires_grad]
        # `stack` rejects an empty list, as of a model whose parameters are all frozen.
        return self.weight * torch.stack(squares).sum() if squares else torch.zeros((), device=context.device)


def _configured(config: Mapping[str, Any]) -> LossFunction:
    arguments = config.get("parameters", {}).get("loss_criterion", {})
    criterion: LossFunction = losses.get(config.get("loss_criterion", "CrossEntropyLoss"))(**arguments)
    return criterion


def _on_device_of(outputs: Tensor, weight: Tensor | None) -> Tensor | None:
    """Return a weight on the device of the outputs; the caller stores it, so that it is moved only once."""
    return weight if weight is None or weight.device == outputs.device else weight.to(outputs.device)
