"""Abstract bases of the seven kinds of strategies: loss, optimizer, step, scheduler, update, data loader, testing.

A strategy defines *what* is computed. It receives the training context and never a trainer, so any strategy works in
any trainer and beside any other. Every kind has one task and one to three methods; the rest are optional hooks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.trainers.bound_scheduler import BoundScheduler
from dovetail.trainers.context import Phase, TrainingContext

if TYPE_CHECKING:
    from dovetail.trainers.context import Interval

__all__ = [
    "DataLoaderStrategy",
    "LRSchedulerStrategy",
    "LossCriterionStrategy",
    "ModelUpdateStrategy",
    "OptimizerStrategy",
    "Phase",
    "Strategy",
    "TestingStrategy",
    "TrainingContext",
    "TrainingStepStrategy",
]


class Strategy:
    """Base of all strategies: setup and teardown, hooks, and a state that is part of checkpoints.

    `setup` and `teardown` are called once per trainer. Capture values that belong to one run, such as its initial
    weights, in `on_train_start`.

    Attributes:
        vectorizes: True if the strategy can train many models at once: every tensor of the model has a leading
            dimension with one row per model, and so has the loss.
    """

    role: ClassVar[str] = ""
    vectorizes: ClassVar[bool] = False

    def setup(self, context: TrainingContext) -> None:
        """Prepare the strategy. Called once, when the trainer is built."""

    def teardown(self, context: TrainingContext) -> None:
        """Release resources. Called once, when the trainer is closed, also after an error."""

    def on_prepare(self, context: TrainingContext) -> None:
        """Create a value that another strategy reads in its `on_train_start`, unless the value exists.

        Called before `on_train_start` of any strategy, and possibly without a run. The model is always a single one,
        also for a strategy that `vectorizes`.
        """

    def on_train_start(self, context: TrainingContext) -> None:
        """Called before the first batch of every run."""

    def on_train_end(self, context: TrainingContext) -> None:
        """Called after the last batch of every run, unless an error ended the run."""

    def on_epoch_start(self, context: TrainingContext) -> None:
        """Called before the first batch of every epoch."""

    def on_epoch_end(self, context: TrainingContext) -> None:
        """Called after every epoch."""

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Called before an optimizer steps: gradients are complete and unscaled, and may be changed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""


class LossCriterionStrategy(Strategy, ABC):
    """Defines the loss.

    Example:
        >>> import torch
        >>> class SquaredError(LossCriterionStrategy):
        ...     def compute_loss(self, outputs, labels, context):
        ...         return (outputs - labels).square().mean()
        >>> SquaredError().compute_loss(torch.ones(2), torch.zeros(2), context=None)
        tensor(1.)
    """

    role = "loss"
    # True for a loss of mutually exclusive classes, so that the accuracy is a valid metric.
    is_classification: bool = False

    def classifies(self, context: TrainingContext) -> bool:
        """Return whether the accuracy is a valid metric in this run; called at its start."""
        return self.is_classification

    def criterion(self, context: TrainingContext) -> Callable[[Any, Any], Tensor]:
        """Return the loss as a callable of outputs and labels; called once, before the first run."""
        return partial(self.compute_loss, context=context)

    @abstractmethod
    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the loss of one batch: a scalar, normalised per batch."""


class OptimizerStrategy(Strategy, ABC):
    """Defines the optimizer of the parameters."""

    role = "optimizer"

    @abstractmethod
    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        """Return the optimizer of a model; called at the start of a run."""

    def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Called after every real step of the optimizer; not if a scaler skipped it or a window deferred it."""


class TrainingStepStrategy(Strategy, ABC):
    """Defines the computation of one batch."""

    role = "training_step"

    @abstractmethod
    def training_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Callable[[Any, Any], Tensor],
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch.

        The strategy may only return the loss: the loop then computes the gradients and steps. Or it calls
        `context.backward(loss)` and `context.step(optimizer)` itself. In both cases precision, accumulation and
        clipping apply.
        """


class LRSchedulerStrategy(Strategy, ABC):
    """Defines the learning-rate schedule and its interval.

    Attributes:
        interval: The scheduler steps at every `epoch`, every `update`, or every `batch`.
        frequency: Step at every n-th of these.
    """

    role = "lr_scheduler"
    interval: Interval = "epoch"
    frequency: int = 1

    @abstractmethod
    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> Any:
        """Return a scheduler of torch, or None for a constant rate; called once for each optimizer."""

    def step(self, scheduler: Any, context: TrainingContext) -> None:
        """Advance the scheduler; called when its interval has passed. None means a constant rate: nothing to do."""
        if scheduler is not None:
            scheduler.step()

    def bind(self, scheduler: Any, context: TrainingContext) -> BoundScheduler:
        """Return the scheduler with its interval and its step; called after `create_scheduler`."""
        return BoundScheduler(scheduler, self.interval, self.frequency, stepper=partial(self.step, scheduler, context))


class ModelUpdateStrategy(Strategy):
    """Acts before and after updates of the model, and defines the payload that is sent with its weights."""

    role = "model_update"

    def before_step(self, context: TrainingContext) -> None:
        """Called before the first batch of an update."""

    def after_step(self, context: TrainingContext) -> None:
        """Called after every real update."""

    def get_update_payload(self, context: TrainingContext) -> dict[str, Any]:
        """Return the entries that `obtain_model_update` adds to the weights, by name."""
        return {}

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return the phases of a run of `epochs` epochs, in order; called when a run is planned."""
        return (Phase(epochs),)

    def on_phase_start(self, phase: Phase, context: TrainingContext) -> None:
        """Called before the first epoch of a phase, if the strategy overrides `phases`."""


class DataLoaderStrategy(Strategy, ABC):
    """Defines how a training set is divided into batches."""

    role = "data_loader"

    @abstractmethod
    def create_train_loader(
        self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
    ) -> Iterable[Any]:
        """Return the training batches; called at the start of a run.

        Args:
            trainset: A dataset, or tensors or arrays.
            sampler: Indices, a torch sampler, an object with `.get()`, or None for all samples.
            batch_size: Samples per batch.
            context: Its `state["order_seed"]` is the seed of the run's data order.
        """


class TestingStrategy(Strategy, ABC):
    """Defines how a trained model is tested."""

    role = "testing"
    # Otherwise pytest collects this class because of its name.
    __test__ = False

    @abstractmethod
    def test_model(
        self, model: nn.Module, config: Mapping[str, Any], testset: Any, sampler: Any, context: TrainingContext
    ) -> float:
        """Return one number for the model on a test set; called in evaluation mode and without gradients."""
