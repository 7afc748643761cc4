"""Explanation of a trainer as a tree: its parts, and the plan of its next epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from dovetail.printing import show_bytes
from dovetail.trainers.base import Trainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.preserve_state import layers, strategies_of
from dovetail.trainers.rehearsal import EpochForecast, forecast_epoch, is_ours, owners_of
from dovetail.trainers.strategies.bundle import ROLES, Strategies
from dovetail.trainers.strategies.nesting import shown
from dovetail.units import Epochs, TrainUnit, unit_name

if TYPE_CHECKING:
    from dovetail.trainers.capabilities.timed import Spent


@runtime_checkable
class Measured(Protocol):
    """A layer that has measured the times of the last run, such as `Timed`."""

    @property
    def verb_times(self) -> Mapping[str, Spent]:
        """Seconds and calls by verb; empty before the first run."""


@runtime_checkable
class Placed(Protocol):
    """A layer that arranges processes in a mesh, such as `ShardedDataParallel`."""

    @property
    def shown_mesh(self) -> str:
        """The sizes of the mesh by name, as text; empty if the user chose no mesh."""


class Explanation(str):
    """A tree as text, which a prompt or a notebook shows with its line breaks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(trainer: Trainer) -> Explanation:
    """Return a tree of layers, verbs, strategies, callbacks, and the plan of the next epoch.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> data = torch.zeros(96, 4)
        >>> trainer = Trainer(torch.nn.Linear(4, 2), "cpu", train_dataset=data, batch_size=8, verbose=False)
        >>> explain(trainer)
        Trainer
        ├── layers, the outermost first
        │   ├── Trainer
        │   └── SingleProcessTrainer
        ├── model: Linear on cpu, 10 parameters, 10 of them trainable
        │   └── memory: parameters 40 B, gradients 40 B, optimizer state 88 B
        ├── verbs: none is overridden
        ├── callbacks, in order
        │   └── NonFiniteLoss
        └── next epoch: 1 of 10
            ├── 12 batches of 8 samples
            ├── 12 updates
            ├── learning rate 0.0001
            ├── no validation: there is no data for it
            └── no checkpoint
    """
    context = trainer.context
    nodes: list[_Node] = [
        ("layers, the outermost first", _shown_layers(trainer)),
    ]
    if mesh := next((layer.shown_mesh for layer in layers(trainer) if isinstance(layer, Placed)), ""):
        nodes.append(f"mesh: {mesh}")
    forecast = forecast_epoch(trainer)
    nodes.append((_shown_model(context), () if context.model is None else [_shown_memory(context.model, forecast)]))
    answers = _answers(trainer)
    nodes.append(("overridden verbs and methods" if answers else "verbs: none is overridden", answers))
    strategies = strategies_of(trainer)
    if isinstance(strategies, Strategies) and strategies.given:
        roles = [role for role in ROLES if role in strategies.given]
        nodes.append(("strategies", [f"{role}: {getattr(strategies, role)!r}" for role in roles]))
    names = [_shown_callback(callback) for callback in context.callbacks]
    nodes.append(("callbacks, in order" if names else "no callbacks", names))
    if times := next((layer.verb_times for layer in layers(trainer) if isinstance(layer, Measured)), {}):
        nodes.append(_shown_times(times))
    nodes.append(_shown_epoch(trainer, forecast))
    return Explanation("\n".join([type(trainer).__name__, *_branches(nodes)]))


# ---------------------------------------------------------------------- showing

_Node = str | tuple[str, Sequence[Any]]

# Methods besides the verbs that a subclass may override, and the role of the strategy that each calls.
_METHOD_ROLES = {
    "get_loss_criterion": "loss",
    "get_optimizer": "optimizer",
    "get_lr_scheduler": "lr_scheduler",
    "get_train_loader": "data_loader",
    "get_test_loader": None,
    "process_outputs": None,
    "batch_length": None,
    "train_step": "training_step",
    "test_model": "testing",
}


def _branches(nodes: Sequence[_Node]) -> list[str]:
    lines = []
    for number, node in enumerate(nodes, start=1):
        label, children = (node, ()) if isinstance(node, str) else node
        knot, stem = ("└── ", "    ") if number == len(nodes) else ("├── ", "│   ")
        lines += [knot + label, *(stem + line for line in _branches(children))]
    return lines


def _shown_layers(trainer: Trainer) -> list[str]:
    shown_classes = []
    for depth, layer in enumerate(layers(trainer)):
        for cls in _classes(layer):
            kind = "" if issubclass(cls, Trainer) else " (add-on)"
            shown_classes.append(cls.__name__ + (kind or (" (decorated)" if depth else "")))
    return shown_classes


def _classes(layer: Trainer) -> list[type[Any]]:
    """Return the classes that a user combined, wrote or named, the outermost first."""
    line, is_decorator = type(layer).__mro__, layer.core is not layer
    names = [cls.__name__ for cls in line]
    return [
        cls
        for cls in line[: names.index("TrainerDecorator") if is_decorator else line.index(Trainer)]
        if cls.__module__ not in _UNNAMED
        # The name of a decorator already identifies its capability.
        and not (is_decorator and not issubclass(cls, Trainer))
        and (is_decorator or not _is_mounted(cls))
    ]


# Modules of base classes that a user neither writes nor names.
_UNNAMED = tuple(f"dovetail.trainers.{it}" for it in ("addons.best_weights", "addons.core", "capabilities.core"))


def _is_mounted(cls: type[Any]) -> bool:
    """Return whether a class only combines an add-on and its base."""
    return not issubclass(cls.__bases__[0], Trainer) and len(cls.__bases__) > 1 and not _own_names(cls)


def _own_names(cls: type[Any]) -> set[str]:
    return {name for name in vars(cls) if not name.startswith(("__", "_abc_"))}


def _answers(trainer: Trainer) -> list[str]:
    """Return a line for each method that a class, a function or a strategy overrides: `name → owner → …`."""
    core, strategies = trainer.core, strategies_of(trainer)
    verbs = [name for name in vars(Trainer) if name in Trainer.__abstractmethods__]
    lines = []
    for name in [*verbs, *(method for method in _METHOD_ROLES if method not in verbs)]:
        owners, passes_on = owners_of(trainer, name)
        answers = [cls.__name__ for cls in owners]
        given, role = vars(core).get(f"_{name}"), _METHOD_ROLES.get(name)
        # If a class does not call `super()`, the function or strategy behind it is never reached, and is not shown.
        if passes_on and name in ("train_step", "test_step") and callable(given):
            answers.append(shown(given))
        elif passes_on and role is not None and isinstance(strategies, Strategies) and role in strategies.given:
            answers.append(repr(getattr(strategies, role)))
        if answers:
            lines.append(f"{name} → {' → '.join(answers)}")
    return lines


def _shown_model(context: TrainingContext) -> str:
    if context.model is None:
        return "no model yet: give the trainer one, Trainer(model, …)"
    total, trainable = count_parameters(context.model)
    return (
        f"model: {type(context.model).__name__} on {context.device}, "
        f"{total:,} parameters, {trainable:,} of them trainable"
    )


def _shown_memory(model: nn.Module, forecast: EpochForecast) -> str:
    """Return the bytes that do not depend on the batch; `dovetail plan` also finds the others."""
    parameters = list(model.parameters())
    total, trained = (
        show_bytes(sum(it.numel() * it.element_size() for it in chosen))
        for chosen in (parameters, [it for it in parameters if it.requires_grad])
    )
    state = "unknown before the first update"
    if forecast.optimizer_bytes is not None:
        state = show_bytes(forecast.optimizer_bytes)
    return f"memory: parameters {total}, gradients {trained}, optimizer state {state}"


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements in the parameters of a model, and how many of them are trained."""
    parameters = list(model.parameters())
    return sum(it.numel() for it in parameters), sum(it.numel() for it in parameters if it.requires_grad)


def _shown_callback(callback: Any) -> str:
    text = repr(callback)
    # The default repr only shows an address.
    return type(callback).__name__ if text == object.__repr__(callback) else text


def _shown_times(times: Mapping[str, Spent]) -> _Node:
    total = sum(spent.seconds for spent in times.values())
    return f"time of the last run: {total:.3f} s", [
        f"{name}: {spent.seconds:.3f} s, {spent.seconds / total:.0%}"
        + (f", {spent.seconds / spent.calls * 1e6:,.0f} µs per call" if name != "rest" and spent.calls else "")
        for name, spent in times.items()
    ]


def _shown_epoch(trainer: Trainer, forecast: EpochForecast) -> _Node:
    """Return the branch of the tree about the next epoch: batches, updates, rate, validations and checkpoints."""
    context = trainer.context
    progress, length = context.progress, forecast.plan.max_length
    label = f"next epoch: {progress.epoch + 1}" + (
        f" of {length.length}" if isinstance(length, Epochs) else f", up to {length}"
    )
    if progress.batch:
        label += f", from batch {progress.batch + 1} on"
    if length.reached(progress):
        # The forecast is then for one epoch more than planned.
        label = f"nothing to train: {length} is reached; one more epoch would be"
    if not forecast.has_data:
        return label, ["no training data yet: pass it to fit"]
    return label, [
        _counted(forecast.num_batches, "batch", "batches")
        + (f" of {forecast.batch_size} samples" if forecast.batch_size is not None else ", samples per batch unknown"),
        _shown_updates(forecast, context.run.window.size),
        _shown_rate(trainer, forecast),
        _shown_validation(forecast),
        *_shown_checkpoints(forecast),
    ]


def _counted(number: int | None, one: str, many: str) -> str:
    if number is None:
        return f"an unknown number of {many}"
    return f"{number:,} {one if number == 1 else many}"


def _shown_updates(forecast: EpochForecast, window: int) -> str:
    updates = _counted(forecast.updates, "update", "updates")
    if window == 1:
        return updates
    return f"{_counted(forecast.updates, 'window', 'windows')} of up to {window} batches, {updates}"


def _shown_rate(trainer: Trainer, forecast: EpochForecast) -> str:
    if forecast.rate is None:
        return "learning rate unknown without an optimizer"
    text = f"learning rate {forecast.rate:.6g}"
    if not is_ours(trainer, "scheduler_step"):
        text += f", moved by {owners_of(trainer, 'scheduler_step')[0][0].__name__}.scheduler_step"
    elif forecast.end_rate is None:
        text += ", at the end of the epoch unknown"
    elif forecast.end_rate != forecast.rate:
        text += f" → {forecast.end_rate:.6g}"
    return text + (", and follows a metric" if forecast.follows_metric else "")


def _shown_validation(forecast: EpochForecast) -> str:
    if forecast.plan.validate is None:
        return "no validation: there is no data for it"
    passes = _counted(forecast.validations, "validation", "validations")
    return f"{passes} of {_counted(forecast.num_val_batches, 'batch', 'batches')}, {_every(forecast.plan.validate)}"


def _every(period: TrainUnit) -> str:
    """Return a period in words, such as `every epoch`; a schedule or a period that is never due as it was given."""
    if not isinstance(period.value, int) or period.value == 0:
        return f"at {period!r}"
    name = unit_name(period)
    one = "batch" if name == "batches" else name.removesuffix("s")
    return f"every {one}" if period.value == 1 else f"every {period.value:,} {name}"


def _shown_checkpoints(forecast: EpochForecast) -> list[str]:
    lines = []
    if forecast.plan.save is not None:
        number = None if forecast.checkpoints is None else len(forecast.checkpoints)
        where = f", the last one {forecast.checkpoints[-1]}" if forecast.checkpoints else ""
        lines.append(f"{_counted(number, 'checkpoint', 'checkpoints')}, {_every(forecast.plan.save)}{where}")
    if forecast.best_checkpoint is not None and forecast.plan.validate is not None:
        lines.append(f"the best validation in {forecast.best_checkpoint}")
    return lines or ["no checkpoint"]
