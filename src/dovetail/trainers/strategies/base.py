"""The seven kinds of strategy: what each is asked, and when.

A strategy says *what* is computed. It knows the training context and never a trainer, so any strategy fits into any
trainer and beside any other. Every kind has one job and one to three methods; the rest are optional hooks.
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
    """What all kinds have in common: a life cycle, hooks, and a state that checkpoints keep.

    `setup` and `teardown` come once per trainer. What belongs to one run, such as the weights that it
    started with, is captured in `on_train_start`.

    Attributes:
        vectorizes: True if the strategy can train many models at once: every tensor of the model has a leading
            dimension with one row per model, and so has the loss.
    """

    role: ClassVar[str] = ""
    vectorizes: ClassVar[bool] = False

    def setup(self, context: TrainingContext) -> None:
        """Once, when the trainer is made."""

    def teardown(self, context: TrainingContext) -> None:
        """Once, when the trainer is closed; also after an error."""

    def on_prepare(self, context: TrainingContext) -> None:
        """Before `on_train_start` of any strategy: create what another strategy reads there, unless it exists.

        May also be called without a run. The model is always a single one, also for a strategy that `vectorizes`.
        """

    def on_train_start(self, context: TrainingContext) -> None:
        """Before the first batch of every run."""

    def on_train_end(self, context: TrainingContext) -> None:
        """After the last batch of every run that no error ended."""

    def on_epoch_start(self, context: TrainingContext) -> None:
        """Before the first batch of every epoch."""

    def on_epoch_end(self, context: TrainingContext) -> None:
        """After every epoch."""

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Before an optimizer really steps: gradients are complete and unscaled, and may be changed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class LossCriterionStrategy(Strategy, ABC):
    """Says what the loss is.

    Example:
        >>> import torch
        >>> class SquaredError(LossCriterionStrategy):
        ...     def compute_loss(self, outputs, labels, context):
        ...         return (outputs - labels).square().mean()
        >>> SquaredError().compute_loss(torch.ones(2), torch.zeros(2), context=None)
        tensor(1.)
    """

    role = "loss"
    # Whether it is the loss of a classifier of exclusive classes, so that accuracy has a meaning.
    is_classification: bool = False

    def classifies(self, context: TrainingContext) -> bool:
        """Whether accuracy has a meaning in a run; asked at its start."""
        return self.is_classification

    def criterion(self, context: TrainingContext) -> Callable[[Any, Any], Tensor]:
        """Return the loss as the trainer calls it, with outputs and labels; asked once, before the first run."""
        return partial(self.compute_loss, context=context)

    @abstractmethod
    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        """Return the loss of one batch: one number, normalised per batch."""


class OptimizerStrategy(Strategy, ABC):
    """Says which optimizer moves the parameters."""

    role = "optimizer"

    @abstractmethod
    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        """Return the optimizer of a model; called at the start of a run."""

    def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """After every real step of the optimizer; never for a step that a scaler skipped or a window deferred."""


class TrainingStepStrategy(Strategy, ABC):
    """Says how one batch is computed."""

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

        Either return it, and the loop differentiates it and steps; or say `context.backward(loss)` and
        `context.step(optimizer)`, and the step is its own. Both ways inherit precision, accumulation and clipping.
        """


class LRSchedulerStrategy(Strategy, ABC):
    """Says how the learning rate moves, and when.

    Attributes:
        interval: What a step of the scheduler follows: every `epoch`, every `update`, or every `batch`.
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
    """Says what happens to the model around its updates, and which payload is sent with its weights."""

    role = "model_update"

    def before_step(self, context: TrainingContext) -> None:
        """Before the batch that opens an update."""

    def after_step(self, context: TrainingContext) -> None:
        """After every real update."""

    def get_update_payload(self, context: TrainingContext) -> dict[str, Any]:
        """Return what `obtain_model_update` adds to the weights, by name."""
        return {}

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return what a run of some epochs is made of, in order; asked when a run is planned."""
        return (Phase(epochs),)

    def on_phase_start(self, phase: Phase, context: TrainingContext) -> None:
        """Before the first epoch of a phase; only called of a strategy that says what phases there are."""


class DataLoaderStrategy(Strategy, ABC):
    """Says how a training set becomes batches."""

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
    """Says how a model is judged."""

    role = "testing"
    # Not a test, whatever its name says to pytest.
    __test__ = False

    @abstractmethod
    def test_model(
        self, model: nn.Module, config: Mapping[str, Any], testset: Any, sampler: Any, context: TrainingContext
    ) -> float:
        """Return one number for the model on a test set; called in evaluation mode and without gradients."""
