"""State of a run that the loop keeps: plan, running batch, stop request, and the role of the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from dovetail.data import Share
from dovetail.errors import ConfigError
from dovetail.trainers.metrics import Meter, Metric
from dovetail.trainers.window import Window
from dovetail.units import Epochs, Progress, TrainUnit

if TYPE_CHECKING:
    from dovetail.checkpoint.shards import RunPeers
    from dovetail.trainers.base import Trainer
    from dovetail.trainers.frozen import FrozenBase
    from dovetail.trainers.saving import Saver


Stage = Literal["train", "valid", "test", "predict"]


@runtime_checkable
class Stateful(Protocol):
    """Any object whose state a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, nested in any way."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore the state returned by `state_dict`."""


@dataclass(frozen=True)
class Phase:
    """Consecutive epochs of a run that train the same weights.

    Attributes:
        epochs: The number of epochs.
        name: The name by which a strategy recognizes the phase.
        is_detached: True if the weights trained in it are not part of the model that the run returns.
    """

    epochs: int
    name: str = ""
    is_detached: bool = False


@dataclass(frozen=True)
class Plan:
    """Length and periods of one call of `fit`.

    Attributes:
        max_length: The length of training, counted from the start of the trainer's progress.
        validate: The validation period, or None for no validation.
        save: The checkpoint period, or None.
        report: Batches between two reports.
        validates_first: True if a new run starts with a validation.
    """

    max_length: TrainUnit
    validate: TrainUnit | None = None
    save: TrainUnit | None = None
    report: int = 10
    validates_first: bool = False

    @property
    def acts_inside(self) -> bool:
        """True if the length or a period may end inside an epoch, because it is not in epochs."""
        # Without a comprehension, which is a further call: short runs of one epoch count in hundreds of calls.
        return not {type(self.max_length), type(self.validate), type(self.save)} <= _WHOLE_EPOCHS


@dataclass
class BatchState:
    """State of the running batch, which the loop resets for each batch.

    Attributes:
        number: The position of the batch in its epoch, counted from 0.
        num_samples: Samples of this process's batch.
        num_records: Samples of the batches of all processes.
        num_tokens: Tokens of this process's batch, a number or a tensor; after the update, of the batches of all
            processes since the last update.
        num_averaged: Items of all processes in the running update, if several processes average their gradients; a
            tensor on an accelerator.
        optimized: True if the step called `context.backward`, so that the loop leaves backward and step to it.
        uses_criterion: True if the loss is the trainer's criterion; False for a step that computes its own loss.
        is_ahead: True if one call has already made the updates of some batches that follow.
        is_idle: True if the batch has weight zero: the process has no batch left and computes along with the others.
        stepped: The optimizers that really stepped.
        gradient_norm: The norm, or largest magnitude, of the newest gradients before they were clipped; None if nothing
            clips them. It is on the device.
    """

    number: int = 0
    num_samples: int = 0
    num_records: int = 0
    num_tokens: Any = 0
    num_averaged: Any = 0.0
    optimized: bool = False
    uses_criterion: bool = False
    is_ahead: bool = False
    is_idle: bool = False
    stepped: list[Optimizer] = field(default_factory=list)
    gradient_norm: Tensor | None = None


@dataclass(slots=True)
class RunState:
    """State that the loop keeps about a run. Callbacks and strategies may read it; only the kernel writes it.

    Attributes:
        trainer: The layer on which `fit`, `evaluate` or `predict` was called; None if nothing runs.
        plan: Length and periods of the running `fit`.
        data: The data of each stage.
        data_set: The name of the data set that is evaluated, if a stage has several; else empty.
        metrics: Metrics over whole passes, by name.
        id: Identifies the checkpoints of this run among others in the folder; a resumed run keeps it.
        saver: Writes the checkpoints; None means that none are written.
        base: The tensors that checkpoints leave out; None means that checkpoints hold the whole model.
        participants: More objects whose state is part of checkpoints, by name.
        window: The accumulation window.
        batch: The running batch.
        num_items: Items that the loss of the running batch is a mean of: its samples, or `num_items` of `train_step`.
        uncounted_tokens: Tokens that `progress` does not count yet: a number, or a tensor on the device.
        is_in_epoch: False between epochs, when `progress.epoch` already counts the epoch that has just ended.
        is_one_of_many: True if many short runs share this trainer, so that compiling for one of them does not pay.
        is_trial: True during a dry run, which makes one update and then restores everything.
        meter: The training metrics of the running epoch.
        validation_names: The full names of the numbers of a validation; a name that ends with an underscore is the
            start of several. None if they are unknown before the first validation.
        validation: The metrics of the last validation, by their full names.
        validated_at: Batches before the last validation; -1 before the first.
        checked: Progress at the last check of what is due.
        phases: The phases of the run.
        is_detached: True while a phase trains weights that are not part of the returned model.
        loss_is_default: True if the user did not choose a loss. The loop then checks that cross entropy fits the data.
        metrics_are_default: True if the user did not choose metrics. Those that do not fit the outputs and targets are
            left out.
        needs_closure: True if an optimizer evaluates the loss itself, as LBFGS does.
        closure: Computes forward and backward of the running batch again, for such an optimizer.
        stop_reason: Why training ends; None if it continues.
        signal: The signal that requested the stop, or None.
        stop_request: The reason and the signal of a stop request that not all processes have received yet.
        interrupted: True if the running epoch ended before its last batch, by a stop or by `max_length`.
    """

    # The run and its parts.
    trainer: Trainer | None = None
    plan: Plan | None = None
    data: dict[str, Any] = field(default_factory=dict)
    data_set: str = ""
    metrics: dict[str, Metric] = field(default_factory=dict)
    id: str = ""
    saver: Saver | None = None
    base: FrozenBase | None = None
    participants: dict[str, Stateful] = field(default_factory=dict)
    # The running epoch and batch.
    window: Window = field(default_factory=Window)
    batch: BatchState = field(default_factory=BatchState)
    num_items: Any = 0
    uncounted_tokens: Any = 0
    is_in_epoch: bool = False
    is_one_of_many: bool = False
    is_trial: bool = False
    meter: Meter = field(default_factory=Meter)
    # Validations, periods and phases.
    validation_names: tuple[str, ...] | None = None
    validation: dict[str, float] = field(default_factory=dict)
    validated_at: int = -1
    checked: Progress = field(default_factory=Progress)
    phases: tuple[Phase, ...] = (Phase(0),)
    is_detached: bool = False
    # Properties of the parts that the loop needs.
    loss_is_default: bool = False
    metrics_are_default: bool = False
    needs_closure: bool = False
    closure: Any = None
    # Requests to stop.
    stop_reason: str | None = None
    signal: int | None = None
    stop_request: tuple[str, int | None] | None = None
    interrupted: bool = False

    @property
    def updated(self) -> bool:
        """True if the running batch made a real optimizer step."""
        return bool(self.batch.stepped)

    def phase_at(self, epoch: int) -> Phase:
        """Return the phase of an epoch, counted from 0; the last phase after the end."""
        ends = accumulate(phase.epochs for phase in self.phases)
        return next((it for it, end in zip(self.phases, ends, strict=True) if epoch < end), self.phases[-1])

    def starts_phase(self, epoch: int) -> bool:
        """Return whether an epoch is the first of its phase."""
        return epoch in accumulate((phase.epochs for phase in self.phases[:-1]), initial=0)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Compute with weights that are not part of the returned model: terms of the loss for that model are off."""
        before, self.is_detached = self.is_detached, True
        try:
            yield
        finally:
            self.is_detached = before

    def register(self, name: str, participant: Stateful) -> None:
        """Include the state of an object with `state_dict` and `load_state_dict` in the checkpoints of the trainer.

        Raises:
            ConfigError: The object lacks one of the two methods, or the name is taken.
        """
        if not isinstance(participant, Stateful):
            raise ConfigError(f"register: {name!r} needs state_dict and load_state_dict, got {participant!r}")
        if name in self.participants:
            raise ConfigError(f"register: {name!r} is registered already: choose another name")
        self.participants[name] = participant

    def count_tokens(self, progress: Progress) -> None:
        """Add the tokens that are not counted yet to `progress`. A tensor is copied to the host."""
        progress.tokens, self.uncounted_tokens = progress.tokens + int(self.uncounted_tokens), 0

    def end(self, reason: str, signal: int | None = None) -> None:
        """End training after the running update; called in every process. The first reason is kept."""
        # The first reason wins; a signal that arrives later is still reported.
        if self.stop_reason is None:
            self.stop_reason = reason
        self.signal = self.signal or signal

    def note_update(self, optimizer: Optimizer) -> None:
        """Record that `train_step` made a whole update without the verbs, as a compiled graph does."""
        self.batch.optimized = True
        self.batch.stepped.append(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process builds these itself; what belongs to a running batch is not copied.
        fresh = {"batch": BatchState(), "closure": None, "is_in_epoch": False}
        return {name: getattr(self, name) for name in self.__slots__} | fresh

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(slots=True)
class ProcessState:
    """Role of this process in a run of several processes.

    Attributes:
        is_main: True if this process writes, displays and logs; of several, only the first one does.
        share: The batches that belong to this process.
        num_processes: The number of processes of the run; more than the shares if several compute the same batches.
        peers: The processes that write and read checkpoints together if each holds a part of the state; else None.
        has_peers: True if a stop request must wait until every process of the run has received it.
        stays_here: True if runs stay in this process, even if a layer has a launcher.
    """

    is_main: bool = True
    share: Share = field(default_factory=Share)
    num_processes: int = 1
    peers: RunPeers | None = None
    has_peers: bool = False
    stays_here: bool = False


_WHOLE_EPOCHS = frozenset({Epochs, type(None)})
