"""From what users give in place of a strategy (a callable, a torch object, a name, a list) to a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.pieces import as_criterion, as_scheduler, bind_scheduler, optimizers, schedulers
from dovetail.trainers.schedules import Schedule
from dovetail.trainers.strategies import base, data_loader, loss, lr_scheduler, model_update, testing, training_step
from dovetail.trainers.strategies import optimizer as optimizer_strategies
from dovetail.trainers.strategies.nesting import Described

if TYPE_CHECKING:
    from dovetail.trainers.context import Interval, TrainingContext

__all__ = [
    "CallableLoaderStrategy",
    "CallableLossStrategy",
    "CallableOptimizerStrategy",
    "CallableSchedulerStrategy",
    "CallableStepStrategy",
    "CallableTestingStrategy",
    "CallableUpdateStrategy",
    "as_loader_strategy",
    "as_loss_strategy",
    "as_optimizer_strategy",
    "as_scheduler_strategy",
    "as_step_strategy",
    "as_testing_strategy",
    "as_update_strategy",
]

S = TypeVar("S", bound=base.Strategy)


def as_loss_strategy(given: Any) -> base.LossCriterionStrategy:
    """Return a loss strategy.

    Args:
        given: A strategy or its class; a callable of outputs and labels; a loss of `torch.nn`, its class or registered
            name; or a list of these or of pairs `(loss, weight)`, for their sum.

    Example:
        >>> as_loss_strategy("MSELoss")
        CallableLossStrategy(loss_fn=MSELoss())
        >>> as_loss_strategy([loss.CrossEntropyLossStrategy, (nn.functional.mse_loss, 0.1)])
        CompositeLossStrategy(strategies=[CrossEntropyLossStrategy(), (CallableLossStrategy(loss_fn=mse_loss), 0.1)])
    """
    if isinstance(given, list):
        pairs = [it if isinstance(it, tuple) else (it, None) for it in given]
        made = [(as_loss_strategy(it), weight) for it, weight in pairs]
        return loss.CompositeLossStrategy([it if weight is None else (it, weight) for it, weight in made])
    strategy: base.LossCriterionStrategy | None = _ready(given, base.LossCriterionStrategy, loss)
    if strategy is not None:
        return strategy
    if isinstance(given, str) or callable(given):
        return CallableLossStrategy(as_criterion(given))
    raise _refused("loss_strategy", "a LossCriterionStrategy, a callable of outputs and labels, or a name", given)


def as_optimizer_strategy(given: Any) -> base.OptimizerStrategy:
    """Return an optimizer strategy.

    Args:
        given: A strategy or its class; a callable of the parameters, such as `partial(AdamW, lr=1e-3)`; an optimizer
            class or its registered name, with the learning rate of the configuration; or an optimizer.

    Example:
        >>> as_optimizer_strategy("AdamW")
        CallableOptimizerStrategy(optimizer=AdamW)
    """
    strategy: base.OptimizerStrategy | None = _ready(given, base.OptimizerStrategy, optimizer_strategies)
    if strategy is not None:
        return strategy
    if isinstance(given, str):
        given = optimizers.get(given)
    if isinstance(given, Optimizer) or callable(given):
        return CallableOptimizerStrategy(given)
    raise _refused(
        "optimizer_strategy", "an OptimizerStrategy, an optimizer, a callable of the parameters, or a name", given
    )


def as_step_strategy(given: Any) -> base.TrainingStepStrategy:
    """Return a step strategy.

    Args:
        given: A strategy, its class or the class's name; a callable with the arguments of `training_step`; or a list
            of these, the outermost first.

    Example:
        >>> as_step_strategy([training_step.GradientAccumulationStepStrategy(4), "MixedPrecisionStepStrategy"])
        GradientAccumulationStepStrategy(accumulation_steps=4, base_strategy=MixedPrecisionStepStrategy())
    """
    if isinstance(given, (list, tuple)):
        return training_step.compose_steps(*map(as_step_strategy, given))
    return _strategy(given, base.TrainingStepStrategy, training_step, CallableStepStrategy)


def as_scheduler_strategy(given: Any) -> base.LRSchedulerStrategy:
    """Return a learning-rate strategy.

    Args:
        given: A strategy or its class; a callable of the optimizer, such as `partial(StepLR, step_size=3)`; a
            registered name that needs no argument; a schedule of ours; or a scheduler.

    Example:
        >>> from functools import partial
        >>> from torch.optim.lr_scheduler import StepLR
        >>> as_scheduler_strategy(partial(StepLR, step_size=3))
        CallableSchedulerStrategy(scheduler=partial(StepLR, step_size=3))
    """
    strategy: base.LRSchedulerStrategy | None = _ready(given, base.LRSchedulerStrategy, lr_scheduler)
    if strategy is not None:
        return strategy
    if isinstance(given, str):
        given = schedulers.get(given)
    if isinstance(given, (Schedule, LRScheduler, ReduceLROnPlateau)) or callable(given):
        return CallableSchedulerStrategy(given)
    raise _refused(
        "lr_scheduler_strategy", "an LRSchedulerStrategy, a scheduler, a callable of the optimizer, or a name", given
    )


def as_update_strategy(given: Any) -> base.ModelUpdateStrategy:
    """Return an update strategy.

    Args:
        given: A strategy, its class or the class's name; a callable of the context, for after every update; or a list
            of these.

    Example:
        >>> as_update_strategy(["StateTrackingUpdateStrategy", repr])
        CompositeUpdateStrategy(strategies=[StateTrackingUpdateStrategy(), CallableUpdateStrategy(function=repr)])
    """
    if isinstance(given, (list, tuple)):
        return model_update.CompositeUpdateStrategy([as_update_strategy(it) for it in given])
    return _strategy(given, base.ModelUpdateStrategy, model_update, CallableUpdateStrategy)


def as_loader_strategy(given: Any) -> base.DataLoaderStrategy:
    """Return a loader strategy.

    Args:
        given: A strategy, its class or the class's name; or a callable with the arguments of `create_train_loader`.

    Example:
        >>> as_loader_strategy("ShuffleDataLoaderStrategy")
        ShuffleDataLoaderStrategy()
    """
    return _strategy(given, base.DataLoaderStrategy, data_loader, CallableLoaderStrategy)


def as_testing_strategy(given: Any) -> base.TestingStrategy:
    """Return a testing strategy.

    Args:
        given: A strategy, its class or the class's name; or a callable with the arguments of `test_model`.

    Example:
        >>> as_testing_strategy(testing.DefaultTestingStrategy)
        DefaultTestingStrategy()
    """
    return _strategy(given, base.TestingStrategy, testing, CallableTestingStrategy)


class CallableLossStrategy(loss.DefaultLossCriterionStrategy):
    """A callable of outputs and labels as a loss strategy.

    Example:
        >>> CallableLossStrategy(nn.functional.mse_loss)
        CallableLossStrategy(loss_fn=mse_loss)
    """


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
        made = given(model.parameters())
        if not isinstance(made, Optimizer):
            raise _refused("optimizer_strategy", "a callable of the parameters that returns an optimizer", made)
        return made


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
        interval: That of the scheduler's kind, known once it is made: our schedules have their own, `OneCycleLR` and
            `CyclicLR` count updates, all others epochs. `DefaultLRSchedulerStrategy` takes another.

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
        made = as_scheduler(self.scheduler, optimizer)
        assert made is not None
        self.interval = bind_scheduler(made).interval
        return made

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
        """Call it."""
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


def _ready(given: Any, kind: type[Any], module: Any) -> Any:
    """Return a strategy from an instance, a class or the name of one in `module`; None for anything else."""
    if isinstance(given, str):
        given = _named_in(module, kind).get(given)
    if isinstance(given, type) and issubclass(given, base.Strategy):
        given = given()
    if isinstance(given, base.Strategy) and not isinstance(given, kind):
        raise ConfigError(f"{kind.role}_strategy: expected a {kind.__name__}, got the {given.role} strategy {given!r}")
    return given if isinstance(given, kind) else None


def _strategy(given: Any, kind: type[Any], module: Any, adapter: Callable[[Any], S]) -> S:
    strategy: S | None = _ready(given, kind, module)
    if strategy is not None:
        return strategy
    if isinstance(given, str):
        raise UnknownNameError(f"{kind.role} strategy", given, _named_in(module, kind))
    if callable(given):
        return adapter(given)
    raise _refused(f"{kind.role}_strategy", f"a {kind.__name__}, its class or name, or a callable", given)


def _named_in(module: Any, kind: type[Any]) -> dict[str, type[Any]]:
    found = ((name, getattr(module, name)) for name in module.__all__)
    return {name: it for name, it in found if isinstance(it, type) and issubclass(it, kind)}


def _refused(argument: str, accepted: str, given: Any) -> ConfigError:
    return ConfigError(f"{argument}: expected {accepted}, got {given!r}")
