"""From what users give (a name, a class, a factory, an object) to the piece that a trainer needs."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from dovetail.errors import ConfigError
from dovetail.registry import Registry
from dovetail.trainers import foreign
from dovetail.trainers.context import BoundScheduler, Interval
from dovetail.trainers.optimizers import LARS, AdaHessian
from dovetail.trainers.schedules import Schedule, ScheduleLR

__all__ = [
    "as_criterion",
    "as_device",
    "as_mode",
    "as_module",
    "as_optimizers",
    "as_scheduler",
    "bind_scheduler",
    "check_device",
    "check_owned",
    "classifies",
    "forward",
    "forward_with",
    "losses",
    "optimizers",
    "requires_closure",
    "schedulers",
    "twin_of",
]


losses: Registry[Any] = Registry("loss", lambda: _classes(nn, nn.modules.loss._Loss), foreign.LOSSES)
optimizers: Registry[Any] = Registry(
    "optimizer", lambda: {**_classes(torch.optim, Optimizer), "AdaHessian": AdaHessian, "LARS": LARS}
)
schedulers: Registry[Any] = Registry(
    "scheduler", lambda: {**_classes(torch_schedulers, LRScheduler), "ReduceLROnPlateau": ReduceLROnPlateau}
)


def as_module(model: Any) -> nn.Module | None:
    """Return the module itself, or the one that a class or a function makes."""
    if model is None or isinstance(model, nn.Module):
        return model
    made = model() if callable(model) else model
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, or a class or function that makes one, got {model!r}")
    return made


def as_device(device: Any, device_id: int | None = None) -> torch.device:
    """Return a device from a name, a number, a device or a list of them.

    Args:
        device: What the user gave; a list stands for its first device; `"auto"` for cuda, mps or cpu.
        device_id: For a `device` of None: -1 for the CPU, else a CUDA device; None for `"auto"`.

    Example:
        >>> as_device(["cpu", "cuda:1"])
        device(type='cpu')
    """
    if isinstance(device, (list, tuple)):
        if not device:
            raise ConfigError("device: expected at least one device, got an empty list")
        device = device[0]
    if device is None and device_id is not None:
        return torch.device("cpu") if device_id < 0 else torch.device("cuda", device_id)
    if device is None or device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected a name such as 'cpu', 'cuda:0' or 'auto', got {device!r}") from error


def check_device(device: torch.device) -> None:
    """Refuse to train on what this machine does not have."""
    lacks_cuda = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if lacks_cuda or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise ConfigError(f"device: {str(device)!r} is not available here; use 'cpu' or 'auto'")


def as_mode(mode: str) -> Literal["train", "test"]:
    """Return the mode of a trainer, or say which there are."""
    if mode in ("train", "test"):
        return cast(Literal["train", "test"], mode)
    raise ConfigError(f"mode: expected 'train' or 'test', got {mode!r}")


def as_criterion(loss: Any) -> Callable[[Any, Any], Tensor]:
    """Return a loss from a name in `torch.nn`, a class, or any callable of outputs and targets."""
    if isinstance(loss, str):
        loss = losses.get(loss)
    made = loss() if isinstance(loss, type) else loss
    if not callable(made):
        raise ConfigError(f"criterion: expected a loss of torch.nn, its name, or a callable, got {loss!r}")
    return made  # type: ignore[no-any-return]  # a module's call is untyped


def as_optimizers(optimizer: Any, model: nn.Module, settings: Mapping[str, Any]) -> list[Optimizer]:
    """Return optimizers from an object, a list of them, a name, a class, or a callable of the parameters.

    Args:
        optimizer: What the user gave.
        model: Whose parameters an optimizer made here is for.
        settings: `lr`, `weight_decay`, `momentum` for an optimizer that is made by name or class; each is passed
            on where the optimizer takes it.
    """
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    if isinstance(optimizer, (list, tuple)):
        return [made for item in optimizer for made in as_optimizers(item, model, settings)]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optimizer, str):
        optimizer = optimizers.get(optimizer)
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to optimise")
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        taken = inspect.signature(optimizer).parameters
        made = optimizer(parameters, **{name: value for name, value in settings.items() if name in taken})
    elif callable(optimizer):
        made = optimizer(parameters)
    else:
        made = optimizer
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer: expected an optimizer of torch, its name, or a callable of the parameters, got {optimizer!r}"
        )
    return [made]


def check_owned(optimizer: Any, model: nn.Module | None, criterion: Any) -> None:
    """Refuse optimizers that are there already, and all of whose parameters are somebody else's."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if model is None or not all(isinstance(it, Optimizer) for it in given):
        return
    modules = [it for it in (model, criterion) if isinstance(it, nn.Module)]
    owned = {parameter for module in modules for parameter in module.parameters()}
    if owned.isdisjoint(parameter for it in given for group in it.param_groups for parameter in group["params"]):
        raise ConfigError(
            "optimizer: none of its parameters is one of the model's: make it of the model that the trainer is given, "
            "or give a callable such as partial(SGD, lr=0.1)"
        )


def as_scheduler(scheduler: Any, optimizer: Optimizer) -> LRScheduler | ReduceLROnPlateau | None:
    """Return a scheduler of `optimizer` from an object, one of our schedules, a name, or a callable of it."""
    if scheduler is None or isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        return scheduler
    if isinstance(scheduler, Schedule):
        return scheduler.bind(optimizer)
    if isinstance(scheduler, str):
        scheduler = schedulers.get(scheduler)
    if isinstance(scheduler, type) and (missing := _missing_arguments(scheduler)):
        name, settings = scheduler.__name__, ", ".join(f"{it}=…" for it in missing)
        raise ConfigError(f"lr_scheduler: {name} needs {' and '.join(missing)}; give partial({name}, {settings})")
    made = scheduler(optimizer) if callable(scheduler) else scheduler
    if not isinstance(made, (LRScheduler, ReduceLROnPlateau)):
        raise ConfigError(
            "lr_scheduler: expected a scheduler of torch, a schedule, or a callable of the optimizer such as "
            f"partial(StepLR, step_size=3), got {scheduler!r}"
        )
    return made


def bind_scheduler(scheduler: LRScheduler | ReduceLROnPlateau, *, on_batch: bool = False) -> BoundScheduler:
    """Return a scheduler with its interval: its own, that of its kind, or per epoch."""
    interval: Interval = "epoch"
    if isinstance(scheduler, ScheduleLR):
        interval = scheduler.interval
    elif on_batch or isinstance(scheduler, (OneCycleLR, CyclicLR)):
        interval = "batch" if on_batch else "update"
    monitor = "valid_accuracy" if isinstance(scheduler, ScheduleLR) else "valid_loss"
    return BoundScheduler(scheduler, interval, monitor=monitor)


def forward(model: Any, inputs: Any) -> Any:
    """Call a model on one input, on several from a tuple or list, or on named ones from a mapping."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def forward_with(model: nn.Module, weights: Mapping[str, Tensor], inputs: Any) -> Any:
    """Call a model with other weights than its own; those that are not named are its own.

    Example:
        >>> import torch
        >>> forward_with(nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.ones(1, 2))
        tensor([[2.]])
    """
    if isinstance(inputs, Mapping):
        return functional_call(model, dict(weights), (), dict(inputs))
    return functional_call(model, dict(weights), tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))


def twin_of(optimizer: Optimizer, twins: Mapping[Tensor, Tensor]) -> Optimizer:
    """Return an optimizer of the same kind and settings, with nothing behind it, for other parameters.

    Args:
        optimizer: The one to be like.
        twins: For each of its parameters the one that takes its place; those without a twin are left out.

    Example:
        >>> import torch
        >>> own, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
        >>> twin_of(torch.optim.SGD([own], lr=0.5, momentum=0.9), {own: other}).param_groups[0]["momentum"]
        0.9
    """
    # Sharing all that copies could share: only groups and state are its own.
    made = copy.copy(optimizer)
    made.param_groups = [
        {**group, "params": [twins[parameter] for parameter in group["params"] if parameter in twins]}
        for group in optimizer.param_groups
    ]
    made.state = defaultdict(dict)
    return made


def classifies(criterion: Any) -> bool:
    """Whether a loss, or what a class makes, is that of a classifier of exclusive classes: accuracy has a meaning."""
    kind = criterion if isinstance(criterion, type) else type(criterion)
    return issubclass(kind, (nn.CrossEntropyLoss, nn.NLLLoss)) or criterion in (
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
    )


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` cannot be called without a function that evaluates the loss."""
    # A scheduler gives an optimizer a step of its own around that of its class, with the same arguments.
    return _requires_closure(type(optimizer).step)


@cache
def _requires_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _missing_arguments(scheduler: type[Any]) -> list[str]:
    """What a scheduler has to be told beside its optimizer."""
    _, *further = inspect.signature(scheduler).parameters.values()
    ordinary = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [it.name for it in further if it.kind in ordinary and it.default is inspect.Parameter.empty]


def _classes(module: Any, kind: type[Any]) -> dict[str, type[Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, kind) and value is not kind and not name.startswith("_")
    }
