"""What a trainer is made of, and what its next epoch will do, without doing any of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.callbacks.base import Callbacks
from dovetail.errors import DataError
from dovetail.history import History
from dovetail.trainers import loop
from dovetail.trainers.base import Trainer
from dovetail.trainers.context import BatchState, Plan, Stage, TrainingContext, Window
from dovetail.trainers.metrics import Meter
from dovetail.trainers.strategies.bundle import ROLES, Strategies
from dovetail.trainers.strategies.nesting import shown
from dovetail.trainers.untouched import kept, layers, strategies_of
from dovetail.units import Epochs

if TYPE_CHECKING:
    from dovetail.trainers.capabilities.timed import Spent
    from dovetail.trainers.single_process import SingleProcessTrainer

__all__ = ["Explanation", "Measured", "Outlook", "count_parameters", "explain", "look_ahead"]


@dataclass(frozen=True)
class Outlook:
    """What the next epoch, or the rest of the running one, will do. None stands for what cannot be known before.

    Attributes:
        plan: What a call of `fit` would be asked to do.
        has_data: Whether there is training data.
        num_batches: Training batches.
        batch_size: Samples in a training batch.
        updates: Accumulation windows, and so updates of every optimizer.
        num_val_batches: Batches in one validation.
        validations: Validation passes.
        checkpoints: Where its periodic checkpoints will lie.
        best_checkpoint: Where the best validation has a checkpoint of its own, if it has.
        rate: The learning rate at the start, None without a model.
        end_rate: The learning rate after the epoch.
        follows_metric: Whether the rate follows a metric besides, which may move it further.
    """

    plan: Plan
    has_data: bool
    num_batches: int | None = None
    batch_size: int | None = None
    updates: int | None = None
    num_val_batches: int | None = None
    validations: int | None = None
    checkpoints: tuple[Path, ...] | None = None
    best_checkpoint: Path | None = None
    rate: float | None = None
    end_rate: float | None = None
    follows_metric: bool = False


def look_ahead(trainer: Trainer, **wishes: Any) -> Outlook:
    """Return what the next epoch will do; the trainer does not change.

    Args:
        trainer: The outermost layer.
        wishes: `max_length`, `validation_period` and `checkpoint_period`, as for `fit`.
    """
    context = trainer.context
    with kept(trainer), warnings.catch_warnings():
        # Torch wants an optimizer to step before its scheduler, and here none steps.
        warnings.simplefilter("ignore")
        _work_on_copies(trainer)
        plan = trainer.plan(**wishes)
        saver, progress = context.run.saver, context.progress
        has_data, num_batches = _length(trainer, "train")
        rest = None if num_batches is None else num_batches - progress.batch
        batch_size = _batch_size(trainer) if has_data else None
        rate = _rate(context.optimizers)
        updates = validations = end_rate = None
        checkpoints: tuple[Path, ...] | None = None
        num_val_batches = _length(trainer, "valid")[1]
        follows_metric = any(bound.takes_metric for bound in context.schedulers)
        if num_batches is not None:
            optimizers, is_over = context.optimizers, plan.max_length.reached(progress)
            planned = replace(plan, max_length=Epochs(progress.epoch + 1)) if is_over else plan
            context.run.plan = planned
            rehearsal = _Rehearsal(trainer, num_batches, batch_size)
            loop.run_epoch(rehearsal, planned)
            updates, validations = rehearsal.num_updates, rehearsal.num_validations
            checkpoints = tuple(rehearsal.checkpoints)
            if _is_ours(trainer, "scheduler_step"):
                end_rate = _rate(optimizers)
        return Outlook(
            plan=plan,
            has_data=has_data,
            num_batches=rest,
            batch_size=batch_size,
            updates=updates,
            num_val_batches=num_val_batches,
            validations=validations,
            checkpoints=checkpoints,
            best_checkpoint=saver.directory / f"best_{saver.name}" if saver is not None and saver.keep_best else None,
            rate=rate,
            end_rate=end_rate,
            follows_metric=follows_metric,
        )


@runtime_checkable
class Measured(Protocol):
    """A layer that knows where the time of the last run went, such as `Timed`."""

    @property
    def verb_times(self) -> Mapping[str, Spent]:
        """Seconds and calls by verb; empty before the first run."""


class Explanation(str):
    """A tree as text, which a prompt or a notebook shows as it is meant to be seen."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(trainer: Trainer) -> Explanation:
    """Return, as a tree: layers, verbs, strategies, callbacks, and what the next epoch will do.

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
        ├── verbs: all of them SingleProcessTrainer's own
        ├── callbacks, in order
        │   └── NonFiniteLoss
        └── epoch 1 of 10
            ├── 12 batches of 8 samples
            ├── 12 updates
            ├── learning rate 0.0001
            ├── no validation: there is no data for it
            └── no checkpoint
    """
    context = trainer.context
    nodes: list[_Node] = [
        ("layers, the outermost first", _shown_layers(trainer)),
        (_shown_model(context), ()),
    ]
    answers = _answers(trainer)
    nodes.append(("verbs and seams" if answers else "verbs: all of them SingleProcessTrainer's own", answers))
    strategies = strategies_of(trainer)
    if isinstance(strategies, Strategies) and strategies.given:
        roles = [role for role in ROLES if role in strategies.given]
        nodes.append(("strategies", [f"{role}: {getattr(strategies, role)!r}" for role in roles]))
    names = [_shown_callback(callback) for callback in context.callbacks]
    nodes.append(("callbacks, in order" if names else "no callbacks", names))
    if times := next((layer.verb_times for layer in layers(trainer) if isinstance(layer, Measured)), {}):
        nodes.append(_shown_times(times))
    nodes.append(_shown_epoch(trainer, look_ahead(trainer)))
    return Explanation("\n".join([type(trainer).__name__, *_branches(nodes)]))


# ---------------------------------------------------------------------- looking ahead


def _work_on_copies(trainer: Trainer) -> None:
    """Give a trainer, for as long as `kept` holds it, optimizers, schedulers and counters that it may spoil."""
    context = trainer.context
    core, strategies = trainer.core, strategies_of(trainer)
    # Weights and moments are large and never written here, so they are shared.
    shared: list[Any] = [context, *layers(trainer)]
    if context.model is not None:
        shared += [context.model, *context.model.parameters()]
    held = [value for strategy in strategies for value in vars(strategy).values()]
    for optimizer in [*context.optimizers, *_optimizers_in([*vars(core).values(), *held])]:
        shared += [value for state in optimizer.state.values() for value in _values(state)]
    memo: dict[int, Any] = {id(each): each for each in shared}
    for name, value in vars(core).items():
        if isinstance(value, (Optimizer, LRScheduler, ReduceLROnPlateau, list, tuple)) and _moves_rates(value):
            vars(core)[name] = copy.deepcopy(value, memo)
    if isinstance(strategies, Strategies):
        # These two may hold optimizers and schedulers that were given as objects.
        optimizer_strategy, scheduler_strategy = copy.deepcopy((strategies.optimizer, strategies.lr_scheduler), memo)
        copied = replace(strategies, optimizer=optimizer_strategy, lr_scheduler=scheduler_strategy)
        copied.is_set_up = strategies.is_set_up
        vars(core)["strategies"] = copied
    context.progress, context.run.batch = copy.copy(context.progress), copy.copy(context.run.batch)
    # What was seen of earlier epochs says nothing about this one.
    context.run.validation, context.state = {}, {**context.state, "last_loss": None}
    # Made by the trainer now if they are not there yet, and from then on ours alone.
    _ = getattr(core, "optimizer", None)
    context.optimizers, context.schedulers = copy.deepcopy((context.optimizers, context.schedulers), memo)


def _moves_rates(value: Any) -> bool:
    kinds = (Optimizer, LRScheduler, ReduceLROnPlateau)
    return isinstance(value, kinds) or (isinstance(value, (list, tuple)) and any(isinstance(it, kinds) for it in value))


def _optimizers_in(values: Iterable[Any]) -> list[Optimizer]:
    flat = [it for value in values for it in (value if isinstance(value, (list, tuple)) else (value,))]
    return [it for it in flat if isinstance(it, Optimizer)]


def _values(state: Any) -> list[Any]:
    return list(state.values()) if isinstance(state, Mapping) else [state]


class _Rehearsal(Trainer):
    """Takes a trainer's place in the loop and counts updates, validations and checkpoints; nothing is computed.

    Args:
        trainer: The trainer. Its schedulers are moved, so they must be copies.
        num_batches: Batches of a whole pass over the training data.
        batch_size: Samples in a batch; None if that is unknown.
    """

    def __init__(self, trainer: Trainer, num_batches: int, batch_size: int | None) -> None:
        self.context = context = trainer.context
        self.num_updates = self.num_validations = 0
        self.checkpoints: list[Path] = []
        self._trainer = trainer if _is_ours(trainer, "scheduler_step") else None
        self._num_batches = num_batches
        self._batch_size = batch_size or 0
        # The loop clears gradients and sets modes of what it finds: it must find neither optimizers nor a model.
        self._optimizers, context.optimizers, context.model = context.optimizers, [], None
        context.callbacks, context.history = Callbacks(), History()
        # A process that is not the main one writes nothing.
        context.process.is_main, context.process.peers, context.process.has_peers = False, None, False
        run = context.run
        run.trainer, run.stop_reason, run.loss_is_default = self, None, False
        run.meter, run.batch, run.window = Meter(), BatchState(), Window(run.window.size)
        run.checked = context.progress.copy()
        if run.saver is not None:
            run.saver = copy.copy(run.saver)
            run.saver.keep_best = False

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        run = self.context.run
        run.batch.optimized = True
        if run.window.closes:
            self.num_updates += 1
            run.batch.stepped.extend(self._optimizers)
        return {}

    def val_epoch(self) -> Mapping[str, float] | None:
        self.num_validations += 1
        return None

    def state_dict(self) -> dict[str, Any]:
        # The loop requests the state when it writes a checkpoint.
        assert self.context.run.saver is not None
        self.checkpoints.append(self.context.run.saver.path(self.context.progress))
        return {}

    def scheduler_step(self, interval: str, metrics: Mapping[str, float] | None = None) -> None:
        if self._trainer is not None:
            self._trainer.scheduler_step(interval)

    def train_epoch(self) -> Mapping[str, float] | None:
        return loop.train_epoch(self.context)

    def batches(self, stage: Stage) -> Iterable[Any]:
        return range(self.context.progress.batch, self._num_batches)

    def num_batches(self, stage: Stage) -> int | None:
        return self._num_batches

    def _batch_length(self, batch: Any) -> int:
        return self._batch_size

    def reduce(self, meter: Meter) -> Meter:
        return meter

    def plan(self, **wishes: Any) -> Plan:
        assert self.context.run.plan is not None
        return self.context.run.plan

    def to_device(self, batch: Any) -> Any:
        return batch

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        return {}

    def predict_step(self, batch: Any) -> Any:
        return None

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        return True

    def setup(self) -> None: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def teardown(self, error: BaseException | None) -> None: ...
    def backward(self, loss: Tensor, **kwargs: Any) -> None: ...
    def clip_gradients(self, optimizer: Optimizer) -> None: ...
    def after_step(self, output: Mapping[str, Any]) -> None: ...


def _length(trainer: Trainer, stage: Stage) -> tuple[bool, int | None]:
    """Whether a stage has data, and how many batches."""
    try:
        return True, trainer.num_batches(stage)
    except DataError:
        return False, None


def _batch_size(trainer: Trainer) -> int | None:
    """The samples of a full training batch, if that can be told without reading any."""
    core = cast("SingleProcessTrainer", trainer.core)
    loader = core._loader("train")
    if isinstance(loader, (list, tuple)) and loader:
        return trainer._batch_length(loader[0])
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def _rate(optimizers: Sequence[Optimizer]) -> float | None:
    return float(optimizers[0].param_groups[0]["lr"]) if optimizers else None


# ---------------------------------------------------------------------- showing

_Node = str | tuple[str, Sequence[Any]]

_SEAMS = {
    "get_loss_criterion": "loss",
    "get_optimizer": "optimizer",
    "get_lr_scheduler": "lr_scheduler",
    "get_train_loader": "data_loader",
    "get_test_loader": None,
    "process_outputs": None,
    "_batch_length": None,
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
    """The classes that a user mounted, wrote or named, the outermost first."""
    line, is_decorator = type(layer).__mro__, layer.core is not layer
    names = [cls.__name__ for cls in line]
    return [
        cls
        for cls in line[: names.index("TrainerDecorator") if is_decorator else line.index(Trainer)]
        if cls.__module__ not in _UNNAMED
        # The name of a decorator says which capability it is.
        and not (is_decorator and not issubclass(cls, Trainer))
        and (is_decorator or not _is_mounted(cls))
    ]


_UNNAMED = tuple(f"dovetail.trainers.{it}" for it in ("addons.best_weights", "addons.core", "capabilities.core"))


def _is_mounted(cls: type[Any]) -> bool:
    """Whether a class only joins an add-on and what it is mounted on."""
    return not issubclass(cls.__bases__[0], Trainer) and len(cls.__bases__) > 1 and not _own_names(cls)


def _own_names(cls: type[Any]) -> set[str]:
    return {name for name in vars(cls) if not name.startswith(("__", "_abc_"))}


def _owners(trainer: Trainer, name: str) -> tuple[list[type[Any]], bool]:
    """The classes that answer a verb or seam, the outermost first, and whether they pass on to the plain trainer."""
    found: list[type[Any]] = []
    for cls in trainer._customized_by(name):
        found.append(cls)
        if not _passes_on(vars(cls)[name]):
            return found, False
    return found, True


def _passes_on(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and "super" in code.co_names


def _is_ours(trainer: Trainer, verb: str) -> bool:
    """Whether only the library answers a verb, so that calling it has no effects but those that are put back."""
    return all(cls.__module__.startswith("dovetail.") for cls in _owners(trainer, verb)[0])


def _answers(trainer: Trainer) -> list[str]:
    core, strategies = trainer.core, strategies_of(trainer)
    verbs = [name for name in vars(Trainer) if name in Trainer.__abstractmethods__]
    lines = []
    for name in [*verbs, *(seam for seam in _SEAMS if seam not in verbs)]:
        owners, passes_on = _owners(trainer, name)
        answers = [cls.__name__ for cls in owners]
        given, role = vars(core).get(f"_{name}"), _SEAMS.get(name)
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


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return how many numbers the parameters of a model hold, and how many of them are trained."""
    parameters = list(model.parameters())
    return sum(it.numel() for it in parameters), sum(it.numel() for it in parameters if it.requires_grad)


def _shown_callback(callback: Any) -> str:
    text = repr(callback)
    # The default shows nothing but an address.
    return type(callback).__name__ if text == object.__repr__(callback) else text


def _shown_times(times: Mapping[str, Spent]) -> _Node:
    total = sum(spent.seconds for spent in times.values())
    return f"time of the last run: {total:.3f} s", [
        f"{name}: {spent.seconds:.3f} s, {spent.seconds / total:.0%}"
        + (f", {spent.seconds / spent.calls * 1e6:,.0f} µs per call" if name != "rest" and spent.calls else "")
        for name, spent in times.items()
    ]


def _shown_epoch(trainer: Trainer, ahead: Outlook) -> _Node:
    context = trainer.context
    progress, length = context.progress, ahead.plan.max_length
    label = f"epoch {progress.epoch + 1}" + (
        f" of {length.length}" if isinstance(length, Epochs) else f", up to {length}"
    )
    if progress.batch:
        label += f", from batch {progress.batch + 1} on"
    if length.reached(progress):
        label = f"nothing to train: {length} is reached; one more epoch would be"
    if not ahead.has_data:
        return label, ["no training data yet: pass it to fit"]
    return label, [
        _counted(ahead.num_batches, "batch", "batches")
        + (f" of {ahead.batch_size} samples" if ahead.batch_size is not None else ", samples per batch unknown"),
        _shown_updates(ahead, context.run.window.size),
        _shown_rate(trainer, ahead),
        _shown_validation(ahead),
        *_shown_checkpoints(ahead),
    ]


def _counted(number: int | None, one: str, many: str) -> str:
    if number is None:
        return f"an unknown number of {many}"
    return f"{number:,} {one if number == 1 else many}"


def _shown_updates(ahead: Outlook, window: int) -> str:
    updates = _counted(ahead.updates, "update", "updates")
    if window == 1:
        return updates
    return f"{_counted(ahead.updates, 'window', 'windows')} of up to {window} batches, {updates}"


def _shown_rate(trainer: Trainer, ahead: Outlook) -> str:
    if ahead.rate is None:
        return "learning rate unknown without an optimizer"
    text = f"learning rate {ahead.rate:.6g}"
    if not _is_ours(trainer, "scheduler_step"):
        text += f", moved by {_owners(trainer, 'scheduler_step')[0][0].__name__}.scheduler_step"
    elif ahead.end_rate is None:
        text += ", at the end of the epoch unknown"
    elif ahead.end_rate != ahead.rate:
        text += f" → {ahead.end_rate:.6g}"
    return text + (", and follows a metric" if ahead.follows_metric else "")


def _shown_validation(ahead: Outlook) -> str:
    if ahead.plan.validate is None:
        return "no validation: there is no data for it"
    passes = _counted(ahead.validations, "validation", "validations")
    return f"{passes} ({ahead.plan.validate}) of {_counted(ahead.num_val_batches, 'batch', 'batches')}"


def _shown_checkpoints(ahead: Outlook) -> list[str]:
    lines = []
    if ahead.plan.save is not None:
        number = None if ahead.checkpoints is None else len(ahead.checkpoints)
        where = f", the last one {ahead.checkpoints[-1]}" if ahead.checkpoints else ""
        lines.append(f"{_counted(number, 'checkpoint', 'checkpoints')} ({ahead.plan.save}){where}")
    if ahead.best_checkpoint is not None and ahead.plan.validate is not None:
        lines.append(f"the best validation in {ahead.best_checkpoint}")
    return lines or ["no checkpoint"]
