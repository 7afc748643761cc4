"""Weighted losses: weights of samples and of classes, and the split of a batch into inputs, targets and weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.data import batch_length, split_batch
from dovetail.errors import ConfigError, DataError
from dovetail.trainers.catalog import classifies, is_torch_loss
from dovetail.trainers.strategies.nesting import Nesting

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext
    from dovetail.trainers.options import TrainerOptions
    from dovetail.trainers.strategies.base import Strategy

_FUNCTIONS = {nn.functional.cross_entropy: nn.CrossEntropyLoss, nn.functional.nll_loss: nn.NLLLoss}


class WeightedTargets(NamedTuple):
    """Targets of a batch, and the weight of each sample; None means that all weights are 1."""

    targets: Any
    weights: Tensor | None


class WeightedLoss(nn.Module):
    """The weighted mean of a loss over the items of a batch.

    The result is divided by the sum of the weights, like torch's `CrossEntropyLoss(weight=…)`. This sum is the number
    of items of the batch, so that accumulation and several processes give the result of one large batch.

    Args:
        criterion: A loss of torch with `reduction="mean"`, or a callable that returns one loss per sample.
        class_weight: Weights by class, in a mapping, a sequence or a tensor. `"balanced"` means the inverse frequencies
            of the classes in the training data, which `count_classes` receives. None means no weights of classes.
        weighs_samples: True if targets are `WeightedTargets`.

    Attributes:
        num_items: The sum of the weights of the last batch.

    Raises:
        ConfigError: The loss cannot be weighted like this.

    Example:
        >>> loss = WeightedLoss(nn.CrossEntropyLoss(), class_weight={1: 3.0})
        >>> outputs, targets = torch.eye(2), torch.tensor([0, 1])
        >>> loss(outputs, targets) == nn.functional.cross_entropy(outputs, targets, torch.tensor([1.0, 3.0]))
        tensor(True)
        >>> loss.num_items
        tensor(4.)
    """

    def __init__(self, criterion: Any, class_weight: Any = None, *, weighs_samples: bool = False) -> None:
        super().__init__()
        criterion = _FUNCTIONS[criterion]() if criterion in _FUNCTIONS else criterion
        # The weights of the classes, once their number is known.
        self._weight: Tensor | None = None
        self._counts: Tensor | None = None
        self.class_weight = _checked(class_weight, criterion)
        self.weighs_samples = weighs_samples
        self.is_classification = classifies(criterion)
        self.num_items: Any = 0
        self.mean, self.each = criterion, criterion
        if isinstance(criterion, nn.modules.loss._Loss) or is_torch_loss(criterion):
            if getattr(criterion, "reduction", None) != "mean":
                raise ConfigError(
                    f"sample_weight, class_weight: expected a loss with reduction='mean', got {criterion!r}; give "
                    "criterion=… as a module of torch.nn"
                )
            # Copies: the user's loss must not change.
            self.mean, self.each = copy.deepcopy(criterion), copy.deepcopy(criterion)
            self.each.reduction = "none"
        if self.class_weight is not None:
            for loss in (self.mean, self.each):
                # Computed again by every trainer, so not part of a checkpoint.
                loss.register_buffer("weight", None, persistent=False)

    @property
    def is_balanced(self) -> bool:
        """Whether the weights of the classes are computed from the training data."""
        return isinstance(self.class_weight, str)

    def count_classes(self, labels: Tensor) -> None:
        """Set the labels of the training data, from which `"balanced"` weights are computed."""
        labels = labels.flatten()
        self._counts = torch.bincount(labels[labels >= 0])
        self._weight = None

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        """Return the weighted mean loss of a batch, and store its number of items."""
        weights: Tensor | None = None
        if isinstance(targets, WeightedTargets):
            targets, weights = targets
        elif self.weighs_samples:
            raise DataError(
                "sample_weight: this step splits batches itself, so the weights of the samples would be read as "
                "targets; use the trainer's own train_step and test_step"
            )
        if targets is None:
            raise DataError("the batch has no targets: give pairs (inputs, targets), or the option target=…")
        if self.class_weight is not None:
            self.mean.weight = self.each.weight = self._class_weights(outputs)
        if weights is None:
            loss: Tensor = self.mean(outputs, targets)
            if loss.ndim == 0:
                items = self._element_weights(outputs, targets)
                self.num_items = batch_length(targets) if items is None else items.sum()
                return loss
            weights = loss.new_ones(len(loss))
        losses = self.each(outputs, targets)
        if not isinstance(losses, Tensor) or not losses.ndim:
            raise ConfigError(
                "sample_weight: expected a loss of torch.nn, or a function that returns one loss per sample, got "
                f"{self.each!r}, which returns one number"
            )
        if weights.shape != losses.shape[:1]:
            raise DataError(
                f"sample_weight: expected one weight for each of {len(losses)} samples, got the shape "
                f"{tuple(weights.shape)}"
            )
        weights = weights.to(losses.dtype)
        elements = self._element_weights(outputs, targets)
        if elements is None:
            losses = losses.flatten(1).mean(1) if losses.ndim > 1 else losses
            items = weights.sum()
        else:
            weights = weights.view(-1, *[1] * (losses.ndim - 1))
            items = (weights * elements).sum()
        self.num_items = items
        # A batch whose weights are all 0 has the loss 0.
        return (weights * losses).sum() / torch.where(items == 0, 1, items)

    def _element_weights(self, outputs: Any, targets: Any) -> Tensor | None:
        """Return the weights of classes of the elements of a classification loss; None for the mean over samples."""
        if not isinstance(self.mean, (nn.CrossEntropyLoss, nn.NLLLoss)) or targets.is_floating_point():
            return None
        counts: Tensor = targets != self.mean.ignore_index
        if self.mean.weight is None:
            return counts.to(outputs.dtype)
        return torch.where(counts, self.mean.weight[torch.where(counts, targets, 0)], 0)

    def _class_weights(self, outputs: Tensor) -> Tensor:
        """Return the weight of every class, in the type that the loss needs."""
        is_reduced = outputs.dtype in (torch.float16, torch.bfloat16)
        # Autocast computes a loss of reduced outputs in float32.
        is_autocast = is_reduced and torch.is_autocast_enabled(outputs.device.type)
        dtype = torch.float32 if is_autocast else outputs.dtype
        number = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
        weight = self._weight
        if weight is None or weight.dtype != dtype or weight.device != outputs.device or len(weight) != number:
            weight = self._weight = self._weights_of(number).to(dtype).to(outputs.device)
        return weight

    def _weights_of(self, number: int) -> Tensor:
        """Return the weight of every class in float64, on the host because some devices have no float64."""
        given = self.class_weight
        if isinstance(given, str):
            if self._counts is None:
                raise ConfigError(
                    "class_weight: 'balanced' counts the classes of the training data, and there is none; give "
                    "train_dataset=…, or the weights"
                )
            counts = self._counts.cpu().double()
            present = counts > 0
            # The rule of scikit-learn. A class without samples has the weight 1, which no sample of training uses.
            weights = torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 1.0)
            given = dict(enumerate(weights.tolist()))
        if isinstance(given, Mapping):
            if beyond := [name for name in given if not 0 <= name < number]:
                raise ConfigError(f"class_weight: the model has {number} classes, got a weight of class {beyond[0]}")
            return torch.tensor([float(given.get(name, 1.0)) for name in range(number)], dtype=torch.float64)
        if len(given) != number:
            raise ConfigError(f"class_weight: the model has {number} classes, got {len(given)} weights")
        return torch.as_tensor(given.cpu() if isinstance(given, Tensor) else given, dtype=torch.float64)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"class_weight={self.class_weight}, weighs_samples={self.weighs_samples}"


def weighted(criterion: Any, options: TrainerOptions) -> Any:
    """Return a loss with the weights that the options describe; the loss itself if they describe none."""
    if options.class_weight is None and not options.sample_weight:
        return criterion
    return WeightedLoss(criterion, options.class_weight, weighs_samples=bool(options.sample_weight))


def find_weighted(strategy: Strategy, options: TrainerOptions) -> WeightedLoss:
    """Return the weighted loss inside a loss strategy.

    Raises:
        ConfigError: The options describe weights, and the loss has none.
    """
    pending: list[Any] = [strategy]
    while pending:
        part = pending.pop()
        loss = getattr(part, "loss_fn", None)
        if isinstance(loss, WeightedLoss):
            return loss
        pending.extend(part.parts if isinstance(part, Nesting) else ())
    name = "sample_weight" if options.sample_weight else "class_weight"
    raise ConfigError(f"{name}: {strategy!r} defines the loss without weights; give one or the other")


class BatchSplit:
    """Splits batches with a named target or with weights of samples.

    Args:
        options: The options with the names of the targets and weights.
        context: The context of the trainer.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer(nn.Linear(2, 1), criterion="MSELoss", target="price", verbose=False)
        >>> BatchSplit(trainer.options, trainer.context)({"x": 1, "price": 2})
        (1, 2)
    """

    def __init__(self, options: TrainerOptions, context: TrainingContext) -> None:
        self._target = options.target if isinstance(options.target, str) else None
        self._weight = options.sample_weight
        self._context = context

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets; the latter are `WeightedTargets` if samples have weights."""
        if not self._weight:
            return split_batch(batch, self._target)
        weights = None
        if isinstance(batch, Mapping):
            if self._weight in batch:
                weights = batch[self._weight]
                batch = {name: value for name, value in batch.items() if name != self._weight}
        elif isinstance(batch, (list, tuple)) and len(batch) > 2:
            weights, batch = batch[-1], batch[:-1]
        inputs, targets = split_batch(batch, self._target)
        if weights is None and self._context.stage == "train":
            shown = sorted(batch) if isinstance(batch, Mapping) else _described(batch)
            raise DataError(
                f"sample_weight: expected batches (inputs, targets, weights), or dictionaries with the key "
                f"{self._weight!r}, got {shown}"
            )
        return inputs, targets if targets is None else WeightedTargets(targets, weights)


def batch_splitter(options: TrainerOptions, context: TrainingContext) -> Any:
    """Return the function that splits a batch into inputs and targets."""
    # The plain function, because every call counts in a small step.
    is_plain = not options.sample_weight and not isinstance(options.target, str)
    return split_batch if is_plain else BatchSplit(options, context)


def weighted_output(loss: Tensor, weighted: WeightedLoss, outputs: Any, targets: Any) -> dict[str, Any]:
    """Return the output of a test step with a weighted loss; metrics receive the targets without weights."""
    if isinstance(targets, WeightedTargets):
        targets = targets.targets
    return {"loss": loss, "num_items": weighted.num_items, "output": outputs, "target": targets}


def _checked(class_weight: Any, criterion: Any) -> Any:
    if class_weight is None:
        return None
    if type(criterion) not in (nn.CrossEntropyLoss, nn.NLLLoss):
        raise ConfigError(f"class_weight: expected CrossEntropyLoss or NLLLoss, got the loss {criterion!r}")
    if criterion.weight is not None:
        raise ConfigError("class_weight: the loss has a weight=… already; give one or the other")
    if isinstance(class_weight, str):
        is_valid = class_weight == "balanced"
    elif isinstance(class_weight, Mapping):
        is_valid = all(isinstance(it, (int, float)) for pair in class_weight.items() for it in pair)
    else:
        is_valid = isinstance(class_weight, Tensor) or (
            isinstance(class_weight, Sequence) and all(isinstance(it, (int, float)) for it in class_weight)
        )
    if not is_valid:
        raise ConfigError(
            "class_weight: expected weights by class such as {0: 1.0, 1: 3.0}, a list or tensor of weights, or "
            f"'balanced', got {class_weight!r}"
        )
    return class_weight


def _described(batch: Any) -> str:
    return f"{len(batch)} items" if isinstance(batch, (list, tuple)) else f"a {type(batch).__name__}"
