"""Rehearsal of the next epoch: the training loop with a trainer that computes nothing, to count what it would do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.callbacks.base import Callbacks
from dovetail.errors import DataError
from dovetail.history import History
from dovetail.trainers import loop
from dovetail.trainers.base import Trainer
from dovetail.trainers.context import BatchState, Plan, Stage, Window
from dovetail.trainers.metrics import Meter
from dovetail.trainers.optimizers import state_bytes
from dovetail.trainers.preserve_state import layers, preserve_attributes, strategies_of
from dovetail.trainers.schedules.whole_run import set_run_lengths
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.units import Epochs

if TYPE_CHECKING:
    from dovetail.trainers.single_process import SingleProcessTrainer


@dataclass(frozen=True)
class EpochForecast:
    """The plan of the next epoch, or of the rest of the running one. None means that a value is unknown in advance.

    Attributes:
        plan: The plan that a call of `fit` would have.
        has_data: True if there is training data.
        num_batches: Training batches.
        batch_size: Samples in a training batch.
        updates: Accumulation windows, and so updates of every optimizer.
        num_val_batches: Batches in one validation.
        validations: Validation passes.
        checkpoints: The paths of the periodic checkpoints.
        best_checkpoint: The path of the separate checkpoint of the best validation, if there is one.
        optimizer_bytes: Bytes of the state of all optimizers after an update.
        rate: The learning rate at the start; None without a model.
        end_rate: The learning rate after the epoch.
        follows_metric: True if a scheduler follows a metric, which may change the rate further.
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
    optimizer_bytes: int | None = None
    rate: float | None = None
    end_rate: float | None = None
    follows_metric: bool = False


def forecast_epoch(trainer: Trainer, **requested: Any) -> EpochForecast:
    """Return the plan of the next epoch; the trainer does not change.

    Args:
        trainer: The outermost layer.
        requested: `max_length`, `validation_period` and `checkpoint_period`, as for `fit`.
    """
    context = trainer.context
    with preserve_attributes(trainer), warnings.catch_warnings():
        # Torch warns if a scheduler steps before its optimizer, and no optimizer steps here.
        warnings.simplefilter("ignore")
        _work_on_copies(trainer)
        plan = trainer.plan(**requested)
        saver, progress = context.run.saver, context.progress
        has_data, num_batches = _length(trainer, "train")
        rest = None if num_batches is None else num_batches - progress.batch
        batch_size = _batch_size(trainer) if has_data else None
        rate = _rate(context.optimizers)
        sizes = [state_bytes(optimizer) for optimizer in context.optimizers]
        optimizer_bytes = None if None in sizes or not sizes else sum(it for it in sizes if it is not None)
        updates = validations = end_rate = None
        checkpoints: tuple[Path, ...] | None = None
        num_val_batches = _length(trainer, "valid")[1]
        follows_metric = any(bound.takes_metric for bound in context.schedulers)
        if num_batches is not None:
            optimizers, is_over = context.optimizers, plan.max_length.reached(progress)
            # If nothing is left to train, show the epoch that would follow.
            planned = replace(plan, max_length=Epochs(progress.epoch + 1)) if is_over else plan
            context.run.plan = planned
            set_run_lengths(cast("SingleProcessTrainer", trainer.core))
            rehearsal = _Rehearsal(trainer, num_batches, batch_size)
            loop.run_epoch(rehearsal, planned)
            updates, validations = rehearsal.num_updates, rehearsal.num_validations
            checkpoints = tuple(rehearsal.checkpoints)
            # The `scheduler_step` of a user may have effects that cannot be undone, so it was not called.
            if is_ours(trainer, "scheduler_step"):
                end_rate = _rate(optimizers)
        return EpochForecast(
            plan=plan,
            has_data=has_data,
            num_batches=rest,
            batch_size=batch_size,
            updates=updates,
            num_val_batches=num_val_batches,
            validations=validations,
            checkpoints=checkpoints,
            best_checkpoint=saver.directory / f"best_{saver.name}" if saver is not None and saver.keep_best else None,
            optimizer_bytes=optimizer_bytes,
            rate=rate,
            end_rate=end_rate,
            follows_metric=follows_metric,
        )


def owners_of(trainer: Trainer, name: str) -> tuple[list[type[Any]], bool]:
    """Return the classes that override a method, the outermost first, and whether they all call `super()`."""
    found: list[type[Any]] = []
    for cls in trainer._customized_by(name):
        found.append(cls)
        if not _calls_super(vars(cls)[name]):
            return found, False
    return found, True


def _calls_super(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and "super" in code.co_names


def is_ours(trainer: Trainer, verb: str) -> bool:
    """Return whether only the library overrides a verb, so that `preserve_attributes` undoes all effects of a call."""
    return all(cls.__module__.startswith("dovetail.") for cls in owners_of(trainer, verb)[0])


def _work_on_copies(trainer: Trainer) -> None:
    """Give a trainer copies of optimizers, schedulers and counters, which the rehearsal may change."""
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
    # Validation results of earlier epochs say nothing about this one.
    context.run.validation, context.state = {}, {**context.state, "last_loss": None}
    # Build the optimizer if it does not exist yet, before it is copied.
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
    """Replaces a trainer in the loop and counts updates, validations and checkpoints; nothing is computed.

    Args:
        trainer: The trainer. Its schedulers are stepped, so they must be copies.
        num_batches: Batches of a whole pass over the training data.
        batch_size: Samples in a batch; None if unknown.
    """

    def __init__(self, trainer: Trainer, num_batches: int, batch_size: int | None) -> None:
        self.context = context = trainer.context
        self.num_updates = self.num_validations = 0
        self.checkpoints: list[Path] = []
        self._trainer = trainer if is_ours(trainer, "scheduler_step") else None
        self._num_batches = num_batches
        self._batch_size = batch_size or 0
        # The loop clears gradients and sets the mode of the model, so the context must have no optimizers and no model.
        self._optimizers, context.optimizers, context.model = context.optimizers, [], None
        context.callbacks, context.history = Callbacks(), History()
        # Only the main process writes checkpoints.
        context.process.is_main, context.process.peers, context.process.has_peers = False, None, False
        run = context.run
        run.trainer, run.stop_reason, run.loss_is_default = self, None, False
        run.meter, run.batch, run.window = Meter(), BatchState(), Window(run.window.size)
        run.checked = context.progress.copy()
        if run.saver is not None:
            run.saver = copy.copy(run.saver)
            # Validations have no metrics here, so none is the best.
            run.saver.keep_best = False

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        run = self.context.run
        run.batch.optimized = True
        if run.window.closes:
            self.num_updates += 1
            run.batch.stepped.extend(self._optimizers)
        # The tokens of a batch are unknown, but a length in tokens must not be reported as a mistake.
        return {"num_tokens": 0}

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

    def batch_length(self, batch: Any) -> int:
        return self._batch_size

    def reduce(self, meter: Meter) -> Meter:
        return meter

    def plan(self, **requested: Any) -> Plan:
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
    """Return whether a stage has data, and its number of batches."""
    try:
        return True, trainer.num_batches(stage)
    except DataError:
        return False, None


def _batch_size(trainer: Trainer) -> int | None:
    """Return the samples of a full training batch, if this is known without reading data."""
    core = cast("SingleProcessTrainer", trainer.core)
    loader = core._loader("train")
    if isinstance(loader, (list, tuple)) and loader:
        return trainer.batch_length(loader[0])
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def _rate(optimizers: Sequence[Optimizer]) -> float | None:
    return float(optimizers[0].param_groups[0]["lr"]) if optimizers else None
