"""Recipe of a trainer: builds the seven strategies from options, objects, names, functions and strategies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.registry import Registry
from dovetail.trainers.catalog import losses, optimizers, schedulers
from dovetail.trainers.options import TrainerOptions
from dovetail.trainers.schedules import RunSchedule, Schedule
from dovetail.trainers.schedules.whole_run import SHAPES
from dovetail.trainers.strategies import (
    base,
    data_loader,
    loss_criterion,
    lr_scheduler,
    model_update,
    testing,
    training_step,
)
from dovetail.trainers.strategies import optimizer as optimizer_strategies
from dovetail.trainers.strategies.adapters import (
    CallableLoaderStrategy,
    CallableLossStrategy,
    CallableOptimizerStrategy,
    CallableSchedulerStrategy,
    CallableStepStrategy,
    CallableTestingStrategy,
    CallableUpdateStrategy,
    OptionLoaderStrategy,
    OptionOptimizerStrategy,
    OptionSchedulerStrategy,
    as_criterion,
)
from dovetail.trainers.strategies.bundle import ROLES, Strategies
from dovetail.trainers.strategies.weighting import weighted

# By role, the arguments of a trainer that would have no effect beside a strategy of that role.
CONFLICTS: dict[str, frozenset[str]] = {
    "loss": frozenset({"loss_function", "sample_weight", "class_weight"}),
    "optimizer": frozenset({"optim_function", "momentum", "weight_decay"}),
    "lr_scheduler": frozenset({"lr_scheduler", "warmup", "scheduler_step_on_batch"}),
    "data_loader": frozenset({"shuffle", "drop_last", "num_workers", "collate_fn", "overfit_batches"}),
}

# Arguments of a constructor that are other names of options.
SPELLINGS = {"criterion": "loss_function", "optimizer": "optim_function", "scheduler": "lr_scheduler"}


def make_strategies(given: Mapping[str, Any], options: TrainerOptions, names: Collection[str]) -> Strategies:
    """Return the seven strategies of a trainer.

    Args:
        given: The values that the user gave as strategies, by role. None means that the options decide.
        options: The options of the trainer.
        names: The options that the user gave, by the names in the call.

    Raises:
        ConfigError: An option and a strategy define the same thing.
    """
    from_user = {role: as_strategy(role, piece) for role, piece in given.items() if piece is not None}
    others = {role: strategy_from_options(role, options) for role in ROLES if role not in from_user}
    # Only `given` ones exclude options; an assigned option replaces the others.
    strategies = Strategies(**from_user, **others, given=frozenset(from_user))
    check_conflicts(strategies, names)
    return strategies


def options_from(
    keywords: Mapping[str, Any], spelled: Mapping[str, Any], also_known: Collection[str]
) -> TrainerOptions:
    """Return the options of a constructor call.

    Args:
        keywords: The options by their names.
        spelled: The arguments that are other names of options, by `SPELLINGS`; None means not given.
        also_known: Further names of arguments, for the suggestion in the error about an unknown one.

    Raises:
        ConfigError: An option is given under both of its names.
        UnknownNameError: There is no such option; the error suggests the nearest name.
    """
    renamed = {SPELLINGS[name]: piece for name, piece in spelled.items() if piece is not None}
    for name, option in SPELLINGS.items():
        if option in keywords and option in renamed:
            raise ConfigError(f"{option}: {name} is another name of it, and both are given; give one or the other")
    return TrainerOptions.from_keywords({**keywords, **renamed}, also_known)


def strategy_from_options(role: str, options: TrainerOptions) -> Any:
    """Return the strategy that the options describe, or None for testing, which evaluates with the metrics."""
    if role == "loss":
        return CallableLossStrategy(weighted(as_criterion(options.loss_function), options))
    if role == "optimizer":
        return OptionOptimizerStrategy(
            options.optim_function, options.learning_rate, options.weight_decay, options.momentum
        )
    if role == "lr_scheduler":
        scheduler = _scheduler_from_options(options)
        if scheduler is None:
            return lr_scheduler.NoSchedulerStrategy()
        return OptionSchedulerStrategy(scheduler, on_batch=options.scheduler_step_on_batch)
    if role == "data_loader":
        shuffles = options.shuffle and not options.overfit_batches
        return OptionLoaderStrategy(shuffles, options.drop_last, options.num_workers, options.collate_fn)
    if role == "training_step":
        return training_step.DefaultTrainingStepStrategy()
    return model_update.NoOpUpdateStrategy() if role == "model_update" else None


def _scheduler_from_options(options: TrainerOptions) -> Any:
    """Return the value of the option `lr_scheduler`, with the warm-up if one is given.

    Raises:
        ConfigError: A warm-up is given, and the schedule is not one over the length of the run.
    """
    scheduler, warmup = options.lr_scheduler, options.warmup
    if not warmup:
        return scheduler
    if scheduler is None:
        return RunSchedule("constant", warmup)
    if isinstance(scheduler, str) and scheduler in SHAPES:
        return RunSchedule(scheduler, warmup)
    if isinstance(scheduler, RunSchedule):
        raise ConfigError(f"warmup: {scheduler!r} has its own; give one or the other")
    raise ConfigError(
        f"warmup: expected lr_scheduler={', '.join(map(repr, SHAPES))} or None, got {scheduler!r}; "
        "WarmupSchedulerStrategy adds a warm-up to any scheduler"
    )


def check_conflicts(strategies: Strategies, names: Collection[str]) -> None:
    """Raise if a named option would have no effect because a strategy defines the same thing."""
    for role in sorted(strategies.given & CONFLICTS.keys()):
        for name in sorted(names):
            if SPELLINGS.get(name, name) in CONFLICTS[role]:
                raise ConfigError(f"{name}: {getattr(strategies, role)!r} decides this; give one or the other")


def has_default_loss(strategies: Strategies, given: Collection[str]) -> bool:
    """Return whether the user chose no loss: neither a strategy nor an option, or a strategy that has none."""
    loss = strategies.loss
    if type(loss) is loss_criterion.DefaultLossCriterionStrategy and loss.loss_fn is None:
        return True
    return "loss" not in strategies.given and "loss_function" not in given


def check_owned(optimizer: Any, model: nn.Module | None, criterion: Any) -> None:
    """Raise if the optimizer is an object without any parameter of the model or the criterion."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    # A name, a class or a callable is called with the right parameters later; only an object can have wrong ones.
    if model is None or not all(isinstance(it, Optimizer) for it in given):
        return
    # An optimizer of the parameters of a loss alone is fine.
    modules = [it for it in (model, criterion) if isinstance(it, nn.Module)]
    owned = {parameter for module in modules for parameter in module.parameters()}
    if owned.isdisjoint(parameter for it in given for group in it.param_groups for parameter in group["params"]):
        raise ConfigError(
            "optimizer: none of its parameters is one of the model's: build it from the model of the trainer, "
            "or give a callable such as partial(SGD, lr=0.1)"
        )


def as_strategy(role: str, given: Any) -> Any:
    """Return a strategy from any value that is accepted in its place.

    Args:
        role: The role, such as `loss`.
        given: A strategy, its class, or the class's name. Or, by role:

            * loss: a callable of outputs and labels, a loss of `torch.nn`, its class or name, or a list of these or of
              pairs `(loss, weight)`, for their sum;
            * optimizer: a callable of the parameters, an optimizer, its class or name;
            * training_step: a callable with the arguments of `training_step`, or a list, the outermost step first;
            * lr_scheduler: a callable of the optimizer, a schedule, a scheduler, or a name that needs no argument;
            * model_update: a callable of the context, for after every update, or a list;
            * data_loader, testing: a callable with the arguments of `create_train_loader` or `test_model`.

    Raises:
        ConfigError: The role does not accept this kind of value.
        UnknownNameError: There is no such name; the error suggests the nearest one.

    Example:
        >>> from functools import partial
        >>> from torch.optim.lr_scheduler import StepLR
        >>> as_strategy("lr_scheduler", partial(StepLR, step_size=3))
        CallableSchedulerStrategy(scheduler=partial(StepLR, step_size=3))
        >>> as_strategy("loss", [(loss_criterion.CrossEntropyLossStrategy, 0.9), (nn.functional.mse_loss, 0.1)]).parts
        [CrossEntropyLossStrategy(), CallableLossStrategy(loss_fn=mse_loss)]
        >>> as_strategy("model_update", ["StateTrackingUpdateStrategy", repr])
        CompositeUpdateStrategy(strategies=[StateTrackingUpdateStrategy(), CallableUpdateStrategy(function=repr)])
    """
    form = _FORMS[role]
    # A list: build each part, then combine them.
    if form.compose is not None and isinstance(given, form.lists):
        return form.compose(given)
    # A name: strategies of this library come before the classes of torch.
    named = {name: it for name, it in vars(form.module).items() if isinstance(it, type) and issubclass(it, form.kind)}
    if isinstance(given, str):
        if given not in named and form.names is None:
            raise UnknownNameError(f"{role} strategy", given, named)
        given = named[given] if given in named else cast("Registry[Any]", form.names).get(given)
    # A class of a strategy: this works if all of its arguments have defaults.
    if isinstance(given, type) and issubclass(given, base.Strategy):
        given = given()
    if isinstance(given, form.kind):
        return given
    # Otherwise a callable strategy of another role would be wrapped as a plain function.
    if isinstance(given, base.Strategy):
        raise ConfigError(f"{role}_strategy: expected a {form.kind.__name__}, got the {given.role} strategy {given!r}")
    # Anything else is wrapped by the adapter of its role.
    if isinstance(given, form.objects) or callable(given):
        return form.adapter(given)
    accepted = form.accepted or f"a {form.kind.__name__}, its class or name, or a callable"
    raise ConfigError(f"{role}_strategy: expected {accepted}, got {given!r}")


@dataclass(frozen=True)
class _Form:
    """The values that a role accepts in place of a strategy.

    Attributes:
        kind: The base class of the role's strategies.
        module: The module whose strategies can be given by name.
        adapter: Builds a strategy from a callable or an object.
        names: Names of torch that are also accepted.
        objects: Accepted types that may not be callable.
        compose: Builds one strategy from a list; None if a list is not accepted.
        lists: The types that count as a list.
        accepted: The accepted values, for an error message; empty for the default text.
    """

    kind: type[base.Strategy]
    module: ModuleType
    adapter: Callable[[Any], base.Strategy]
    names: Registry[Any] | None = None
    objects: tuple[type, ...] = ()
    compose: Callable[[Sequence[Any]], base.Strategy] | None = None
    lists: tuple[type[Sequence[Any]], ...] = (list, tuple)
    accepted: str = ""


def _weighted_sum(given: Sequence[Any]) -> base.Strategy:
    pairs = [it if isinstance(it, tuple) else (it, None) for it in given]
    weighted = [(as_strategy("loss", it), weight) for it, weight in pairs]
    return loss_criterion.CompositeLossStrategy([it if weight is None else (it, weight) for it, weight in weighted])


_FORMS = {
    "loss": _Form(
        base.LossCriterionStrategy,
        loss_criterion,
        lambda given: CallableLossStrategy(as_criterion(given)),
        names=losses,
        compose=_weighted_sum,
        # A tuple would be one pair of a loss and its weight.
        lists=(list,),
        accepted="a LossCriterionStrategy, a callable of outputs and labels, or a name",
    ),
    "optimizer": _Form(
        base.OptimizerStrategy,
        optimizer_strategies,
        CallableOptimizerStrategy,
        names=optimizers,
        objects=(Optimizer,),
        accepted="an OptimizerStrategy, an optimizer, a callable of the parameters, or a name",
    ),
    "training_step": _Form(
        base.TrainingStepStrategy,
        training_step,
        CallableStepStrategy,
        compose=lambda given: training_step.compose_steps(*(as_strategy("training_step", it) for it in given)),
    ),
    "lr_scheduler": _Form(
        base.LRSchedulerStrategy,
        lr_scheduler,
        CallableSchedulerStrategy,
        names=schedulers,
        objects=(Schedule, LRScheduler, ReduceLROnPlateau),
        accepted="an LRSchedulerStrategy, a scheduler, a callable of the optimizer, or a name",
    ),
    "model_update": _Form(
        base.ModelUpdateStrategy,
        model_update,
        CallableUpdateStrategy,
        compose=lambda given: model_update.CompositeUpdateStrategy([as_strategy("model_update", it) for it in given]),
    ),
    "data_loader": _Form(base.DataLoaderStrategy, data_loader, CallableLoaderStrategy),
    "testing": _Form(base.TestingStrategy, testing, CallableTestingStrategy),
}
