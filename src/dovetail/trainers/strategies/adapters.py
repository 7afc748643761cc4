"""Adapters: callables, torch objects, names and trainer options as strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.data import as_loader, num_batches
from dovetail.errors import ConfigError, add_note
from dovetail.trainers.bound_scheduler import BoundScheduler, bind_scheduler
from dovetail.trainers.catalog import losses, optimizers, schedulers
from dovetail.trainers.schedules import Schedule
from dovetail.trainers.strategies import base, loss_criterion, lr_scheduler
from dovetail.trainers.strategies import optimizer as optimizer_strategies
from dovetail.trainers.strategies.nesting import Described

if TYPE_CHECKING:
    from dovetail.trainers.context import Interval, TrainingContext


def as_criterion(loss: Any) -> Callable[[Any, Any], Tensor]:
    """Return a loss from a name in `torch.nn`, a class, or any callable of outputs and targets."""
    if isinstance(loss, str):
        loss = losses.get(loss)
    criterion = loss() if isinstance(loss, type) else loss
    if not callable(criterion):
        raise ConfigError(f"criterion: expected a loss of torch.nn, its name, or a callable, got {loss!r}")
    return criterion  # type: ignore[no-any-return]  # a module's call is untyped


def as_scheduler(scheduler: Any, optimizer: Optimizer) -> LRScheduler | ReduceLROnPlateau | None:
    """Return a scheduler of `optimizer` from an object, one of our schedules, a name, or a callable of it."""
    if scheduler is None or isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        return scheduler
    if isinstance(scheduler, Schedule):
        return scheduler.bind(optimizer)
    if isinstance(scheduler, str):
        scheduler = schedulers.get(scheduler)
    # The classes of torch are called with the optimizer alone; the error shows the `partial` to write.
    if isinstance(scheduler, type) and (missing := _missing_arguments(scheduler)):
        name, settings = scheduler.__name__, ", ".join(f"{it}=…" for it in missing)
        raise ConfigError(f"lr_scheduler: {name} needs {' and '.join(missing)}; give partial({name}, {settings})")
    built = _call_with_optimizer(scheduler, optimizer) if callable(scheduler) else scheduler
    if not isinstance(built, (LRScheduler, ReduceLROnPlateau)):
        raise ConfigError(
            "lr_scheduler: expected a scheduler of torch, a schedule, or a callable of the optimizer such as "
            f"partial(StepLR, step_size=3), got {scheduler!r}"
        )
    return built


def _call_with_optimizer(build: Callable[[Optimizer], Any], optimizer: Optimizer) -> Any:
    """Return the scheduler that a callable builds for an optimizer.

    Raises:
        ConfigError: The callable returned a scheduler of another optimizer.
    """
    try:
        built = build(optimizer)
    except TypeError as error:
        add_note(
            error,
            "lr_scheduler: the callable gets an optimizer and returns a scheduler; for a function of the number of "
            "steps write partial(LambdaLR, lr_lambda=…)",
        )
        raise
    if getattr(built, "optimizer", optimizer) is not optimizer:
        # Otherwise one optimizer would be scheduled once for each of them, and the others not at all.
        raise ConfigError(
            f"lr_scheduler: the callable was called with one optimizer and returned a {type(built).__name__} of "
            "another one; build the scheduler of the given optimizer, or give scheduler objects"
        )
    return built


class CallableLossStrategy(loss_criterion.DefaultLossCriterionStrategy):
    """A callable of outputs and labels as a loss strategy.

    Example:
        >>> CallableLossStrategy(nn.functional.mse_loss)
        CallableLossStrategy(loss_fn=mse_loss)
    """


@dataclass(frozen=True, eq=False, repr=False)
class OptionOptimizerStrategy(Described, base.OptimizerStrategy):
    """The optimizer that the options of a trainer describe, for the parameters that require a gradient.

    Args:
        optimizer: An optimizer, a list of them, a name, a class, or a callable of the parameters.
        lr: The learning rate of an optimizer that is built by name or class; `config["lr"]` takes precedence.
        weight_decay: Passed to an optimizer that is built by name or class, if it has one.
        momentum: Passed to an optimizer that is built by name or class, if it has one.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> strategy = OptionOptimizerStrategy("SGD", lr=0.1, weight_decay=0.0, momentum=0.9)
        >>> strategy.create_optimizer(nn.Linear(1, 1), TrainingContext()).defaults["momentum"]
        0.9
    """

    optimizer: Any
    lr: float
    weight_decay: float
    momentum: float

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Any:
        """Return the optimizer of a model, or the list of optimizers if a list was given."""
        settings = {
            "lr": context.config.get("lr", self.lr),
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
        }
        if isinstance(self.optimizer, (list, tuple)):
            return [_optimizer_from(each, model, settings) for each in self.optimizer]
        return _optimizer_from(self.optimizer, model, settings)


@dataclass(frozen=True, eq=False, repr=False)
class OptionSchedulerStrategy(Described, base.LRSchedulerStrategy):
    """The scheduler that the options of a trainer describe. A scheduler that follows a metric gets it every epoch.

    Args:
        scheduler: A scheduler, a schedule, a name, or a callable of the optimizer.
        on_batch: True to step a scheduler of torch at every batch.

    Example:
        >>> import torch
        >>> strategy = OptionSchedulerStrategy("ConstantLR", on_batch=True)
        >>> scheduler = strategy.create_scheduler(torch.optim.SGD([torch.zeros(1)], lr=1.0), context=None)
        >>> strategy.bind(scheduler, context=None).interval
        'batch'
    """

    scheduler: Any
    on_batch: bool = False

    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> Any:
        """Return the scheduler of an optimizer."""
        return as_scheduler(self.scheduler, optimizer)

    def bind(self, scheduler: Any, context: TrainingContext) -> BoundScheduler:
        """Return the scheduler with the interval of its kind."""
        return bind_scheduler(scheduler, on_batch=self.on_batch)


@dataclass(frozen=True, eq=False, repr=False)
class OptionLoaderStrategy(Described, base.DataLoaderStrategy):
    """The training batches that the options of a trainer describe.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> import torch
        >>> context = TrainingContext()
        >>> context.state["order_seed"] = 0
        >>> strategy = OptionLoaderStrategy(shuffle=False, drop_last=True, num_workers=0)
        >>> len(strategy.create_train_loader(torch.arange(5), None, 2, context))
        2
    """

    shuffle: bool
    drop_last: bool
    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def create_train_loader(
        self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
    ) -> Iterable[Any]:
        """Return the training batches; data smaller than one batch is kept even if `drop_last` is true."""
        settings = {
            "batch_size": batch_size,
            "shuffle": self.shuffle,
            "num_workers": self.num_workers,
            "seed": context.state["order_seed"],
            "sampler": sampler,
            "collate_fn": self.collate_fn,
        }
        loader = as_loader(trainset, drop_last=self.drop_last, **settings)
        # An epoch without batches would train nothing.
        return loader if num_batches(loader) != 0 else as_loader(trainset, drop_last=False, **settings)


@dataclass(frozen=True, eq=False, repr=False)
class CallableOptimizerStrategy(Described, base.OptimizerStrategy):
    """An optimizer, its class, or a callable of the parameters as an optimizer strategy.

    Example:
        >>> import torch
        >>> from dovetail.trainers.context import TrainingContext
        >>> strategy = CallableOptimizerStrategy(torch.optim.SGD)
        >>> strategy.create_optimizer(nn.Linear(1, 1), TrainingContext()).param_groups[0]["lr"]
        0.01
    """

    optimizer: Any

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        """Return the optimizer of a model."""
        given = self.optimizer
        if isinstance(given, Optimizer):
            return given
        if isinstance(given, type) and issubclass(given, Optimizer):
            return optimizer_strategies.make_optimizer(given, model, context, {})
        optimizer = given(model.parameters())
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "optimizer_strategy: expected a callable of the parameters that returns an optimizer, "
                f"got {optimizer!r}"
            )
        return optimizer


@dataclass(frozen=True, eq=False, repr=False)
class CallableStepStrategy(Described, base.TrainingStepStrategy):
    """A callable with the arguments of `training_step` as a step strategy.

    Example:
        >>> def step(model, optimizer, examples, labels, loss_criterion, context):
        ...     return loss_criterion(model(examples), labels)
        >>> CallableStepStrategy(step)
        CallableStepStrategy(function=step)
    """

    function: Callable[..., Tensor]

    def training_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Callable[[Any, Any], Tensor],
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch."""
        return self.function(model, optimizer, examples, labels, loss_criterion, context)


@dataclass(eq=False, repr=False)
class CallableSchedulerStrategy(Described, base.LRSchedulerStrategy):
    """A scheduler, a schedule or a callable of the optimizer as a learning-rate strategy.

    Attributes:
        interval: The interval of the scheduler's kind, set when it is created: our schedules have their own,
            `OneCycleLR` and `CyclicLR` count updates, all others epochs. `DefaultLRSchedulerStrategy` takes another.

    Example:
        >>> import torch
        >>> from dovetail.trainers.schedules import Triangular
        >>> strategy = CallableSchedulerStrategy(Triangular(stepsize=4))
        >>> _ = strategy.create_scheduler(torch.optim.SGD([torch.zeros(1)], lr=1.0), context=None)
        >>> strategy.interval
        'update'
    """

    scheduler: Any
    interval: Interval = field(default="epoch", init=False)

    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> LRScheduler | ReduceLROnPlateau:
        """Return the scheduler."""
        scheduler = as_scheduler(self.scheduler, optimizer)
        assert scheduler is not None
        # The kind of the scheduler determines it, and is known only now.
        self.interval = bind_scheduler(scheduler).interval
        return scheduler

    def step(self, scheduler: Any, context: TrainingContext) -> None:
        """Advance the scheduler."""
        lr_scheduler.step_scheduler(scheduler, context, interval=self.interval)


@dataclass(frozen=True, eq=False, repr=False)
class CallableUpdateStrategy(Described, base.ModelUpdateStrategy):
    """A callable of the context, called after every real update, as an update strategy.

    Example:
        >>> CallableUpdateStrategy(lambda context: print("updated")).after_step(context=None)
        updated
    """

    function: Callable[[TrainingContext], object]

    def after_step(self, context: TrainingContext) -> None:
        """Call the function."""
        self.function(context)


@dataclass(frozen=True, eq=False, repr=False)
class CallableLoaderStrategy(Described, base.DataLoaderStrategy):
    """A callable with the arguments of `create_train_loader` as a loader strategy.

    Example:
        >>> strategy = CallableLoaderStrategy(lambda trainset, sampler, batch_size, context: trainset.split(batch_size))
        >>> import torch
        >>> len(strategy.create_train_loader(torch.arange(5), None, 2, context=None))
        3
    """

    function: Callable[..., Iterable[Any]]

    def create_train_loader(
        self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
    ) -> Iterable[Any]:
        """Return the training batches."""
        return self.function(trainset, sampler, batch_size, context)


@dataclass(frozen=True, eq=False, repr=False)
class CallableTestingStrategy(Described, base.TestingStrategy):
    """A callable with the arguments of `test_model` as a testing strategy.

    Example:
        >>> CallableTestingStrategy(lambda *test: 0.5).test_model(None, {}, None, None, context=None)
        0.5
    """

    function: Callable[..., float]

    def test_model(
        self, model: nn.Module, config: Mapping[str, Any], testset: Any, sampler: Any, context: TrainingContext
    ) -> float:
        """Return one number for the model."""
        return float(self.function(model, config, testset, sampler, context))


def _optimizer_from(given: Any, model: nn.Module, settings: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer from an object, a name, a class, or a callable of the parameters.

    Args:
        given: The value that the user passed.
        model: The model whose parameters a new optimizer gets.
        settings: Arguments for an optimizer that is built by name or class; those that it does not have are omitted.
    """
    if isinstance(given, Optimizer):
        return given
    # Unlike the strategies in `optimizer.py`, the options leave out frozen parameters.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(given, str):
        given = optimizers.get(given)
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to optimise")
    if isinstance(given, type) and issubclass(given, Optimizer):
        # Adam, for example, takes no momentum.
        taken = inspect.signature(given).parameters
        optimizer = given(parameters, **{name: value for name, value in settings.items() if name in taken})
    else:
        optimizer = given(parameters) if callable(given) else given
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer: expected an optimizer of torch, its name, or a callable of the parameters, got {given!r}"
        )
    return optimizer


def _missing_arguments(scheduler: type[Any]) -> list[str]:
    """Return the required arguments of a scheduler other than the optimizer."""
    _, *further = inspect.signature(scheduler).parameters.values()
    ordinary = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [it.name for it in further if it.kind in ordinary and it.default is inspect.Parameter.empty]
