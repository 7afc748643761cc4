"""What the layers of a trainer, its strategies and its callbacks share during a run.

The context routes, it does not think: user code says `context.backward(loss)` and `context.step(optimizer)`, and the
outermost layer of the trainer answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dovetail.callbacks.base import Callbacks
from dovetail.data import Share
from dovetail.history import History
from dovetail.trainers.metrics import Meter, Metric
from dovetail.trainers.precision import Precision
from dovetail.units import Progress, TrainUnit

if TYPE_CHECKING:
    from dovetail.checkpoint.shards import Peers
    from dovetail.trainers.base import Trainer
    from dovetail.trainers.saving import Saver

_NOT_RUNNING = "the context routes only while fit, evaluate or predict runs"

__all__ = ["BoundScheduler", "Interval", "Phase", "Plan", "Stage", "Stateful", "TrainingContext", "Window"]

_R = TypeVar("_R")

Stage = Literal["train", "valid", "test", "predict"]
Interval = Literal["update", "batch", "epoch", "manual"]


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, nested as you like."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take back what `state_dict` gave."""


class Window:
    """The accumulation window: which batches share one update, and by how much each counts.

    A loss is a mean over the items of its batch. The gradient of one large batch is therefore the mean of the
    micro-batches' gradients *weighted by their items*. How many items a window will hold is not known when its first
    loss is differentiated, so each loss is divided by the items expected (the size of the window times the items of
    its first batch) and the gradients are rescaled when the window closes. In the usual case, equal batches and
    a full window, that factor is exactly one and costs nothing.

    Attributes:
        size: Batches in a full window.
        opens: Whether the running batch is the first of its window.
        closes: Whether the running batch is the last of its window, so that optimizers really step.
    """

    __slots__ = ("_deferred", "_expected", "_items", "_position", "closes", "opens", "size")

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.opens = True
        self.closes = True
        self._position = 0
        self._expected: Any = 1
        self._items: Any = 0
        self._deferred: list[Optimizer] = []

    def begin(self, *, is_last: bool) -> None:
        """Count a batch in, knowing whether the epoch ends with it."""
        self._position = 1 if self.closes else self._position + 1
        self.opens = self._position == 1
        self.closes = is_last or self._position == self.size
        if self.opens:
            self._items = 0
            # Of a window that an error has cut short.
            self._deferred.clear()

    def weight(self, num_items: Any, *, first_of_batch: bool) -> Any:
        """Return the factor for a loss over `num_items` items of the running batch."""
        if isinstance(num_items, Tensor):
            # A count of integers would be divided in float32, which is too coarse for a float64 loss.
            num_items = num_items.double()
        if first_of_batch:
            if self.opens:
                self._expected = num_items * self.size
            self._items = self._items + num_items
        return num_items / self._expected

    @property
    def num_batches(self) -> int:
        """Batches of the window so far."""
        return max(self._position, 1)

    @property
    def items(self) -> Any:
        """Items of the window so far, where several batches share it."""
        return self._items

    @property
    def expected(self) -> Any:
        """Items that a loss of the window is divided by, where several batches share it."""
        return self._expected

    def settle(self, optimizer: Optimizer) -> None:
        """Make the gradients those of one large batch, now that the window's items are all known, for a last step."""
        if optimizer in self._deferred:
            self._deferred.remove(optimizer)
        factor = self._expected / self._items
        if isinstance(factor, Tensor) or factor != 1.0:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)

    def defer(self, optimizers: Iterable[Optimizer]) -> None:
        """Remember optimizers that were asked to step before the window closes."""
        self._deferred += [optimizer for optimizer in optimizers if optimizer not in self._deferred]

    def take_deferred(self) -> list[Optimizer]:
        """Return, and forget, the deferred optimizers that nobody asked again to step when the window closed."""
        waiting, self._deferred = self._deferred, []
        return waiting


@dataclass
class BoundScheduler:
    """A learning-rate scheduler and when it steps.

    Attributes:
        scheduler: Any scheduler of torch, or one of ours bound to an optimizer.
        interval: `update` counts the real steps of its own optimizer, `batch` the batches (caught up at the next
            update, never between two), `epoch` the epochs; `manual` is stepped by its owner.
        frequency: Step at every n-th of these.
        stepper: Called in place of the scheduler's own `step`, if given.
        monitor: The metric that `ReduceLROnPlateau` and its like are given.
    """

    # Torch gives its schedulers no common type: `step` takes nothing, an epoch, or a metric.
    scheduler: Any
    interval: Interval = "epoch"
    frequency: int = 1
    monitor: str = "valid_loss"
    stepper: Callable[[], None] | None = None
    count: int = 0
    batches: int = 0
    takes_metric: bool = False

    def __post_init__(self) -> None:
        self.takes_metric = isinstance(self.scheduler, ReduceLROnPlateau) or bool(
            getattr(self.scheduler, "takes_metric", False)
        )

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose rate it moves."""
        optimizer: Optimizer = self.scheduler.optimizer
        return optimizer

    def advance(self, number: int, metrics: Mapping[str, float] | None) -> None:
        """Count `number` further intervals and step as often as they ask for."""
        for _ in range(number):
            self.count += 1
            if self.count % self.frequency == 0:
                self._step(metrics)

    def _step(self, metrics: Mapping[str, float] | None) -> None:
        if self.stepper is not None or not self.takes_metric:
            (self.stepper or self.scheduler.step)()
            return
        value = (metrics or {}).get(self.monitor)
        if value is None:
            value = (metrics or {}).get(self.monitor.replace("valid_", "train_"))
        if value is not None:
            self.scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the counters."""
        return {"scheduler": self.scheduler.state_dict(), "count": self.count, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self.count, self.batches = int(state["count"]), int(state["batches"])


@dataclass(frozen=True)
class Phase:
    """Some epochs of a run in which the same is trained.

    Attributes:
        epochs: How many.
        name: Tells whoever divides a run which one it is.
        is_personal: Whether what is trained is the client's own, and nothing of what it sends.
    """

    epochs: int
    name: str = ""
    is_personal: bool = False


@dataclass(frozen=True)
class Plan:
    """What one call of `fit` was asked to do.

    Attributes:
        max_length: Where training ends, counted from the start of the trainer's progress.
        validate: The validation period, or None for no validation.
        save: The checkpoint period, or None.
        report: Batches between two reports.
        validates_first: Whether a new run begins with a validation.
    """

    max_length: TrainUnit
    validate: TrainUnit | None = None
    save: TrainUnit | None = None
    report: int = 10
    validates_first: bool = False


@dataclass
class _Notes:
    """What the loop notes about the running batch and epoch."""

    batch: int = 0
    # False between epochs, when `progress.epoch` already counts the epoch that has just ended.
    is_in_epoch: bool = False
    # Samples of this process's batch, and of all processes' batches.
    num_samples: int = 0
    num_records: int = 0
    # Items of all processes in the running update, where several average their gradients.
    num_averaged: float = 0.0
    optimized: bool = False
    # Whether the loss of the batch is the trainer's criterion; False for a step that computes its own loss.
    uses_criterion: bool = False
    # Whether weights or data are ahead of the batch: one call makes the updates of some batches that follow, too.
    is_ahead: bool = False
    # Whether the batch counts for nothing: this process has none left, and computes to keep step with the others.
    is_idle: bool = False
    stepped: list[Optimizer] = field(default_factory=list)


class TrainingContext:
    """The shared state of a run, and the way from user code to the outermost layer.

    Attributes:
        trainer: The layer that `fit`, `evaluate` or `predict` was called on.
        model: The module that is trained.
        device: Where batches are moved.
        stage: What runs: train, valid, test or predict.
        config: Settings that strategies and plato's hooks read.
        state: A dictionary that strategies share.
        client_id: 0 for a trainer on its own and for a server, else the client's number.
        client_state: What the client keeps from round to round: each strategy has a key of its own.
        received: What the server sent besides the weights, by name.
        stays: Names of the model's state that stay with the client, and are never sent.
        current_round: The federated round, 0 outside of a federation.
        phases: What the run is made of.
        is_personal: Whether what is trained now is a client's own, and nothing of what it sends.
        working: 1; in a fleet, 1 for every member that has a batch in the running step, and 0 for whoever is done.
        is_fleet: Whether the model is that of a fleet, with a row for each member in every tensor.
        progress: Epochs, batches, records and updates so far.
        history: The record of the run.
        callbacks: Who watches.
        optimizers: In the order in which the loop steps them.
        schedulers: With their intervals.
        metrics: Metrics over whole passes, by name.
        loss_is_default: True if the user did not choose a loss. The loop then checks that cross entropy fits the data.
        metrics_are_default: True if the user did not choose metrics. Those that do not fit the outputs and targets are
            left out.
        validation: The metrics of the last validation, by their full names.
        window: The accumulation window.
        num_items: Items that the running batch's loss is a mean of: its samples, unless `train_step` says otherwise.
        data: Where `batches` finds each stage's data.
        plan: What `fit` was asked to do.
        precision: Mixed precision for the trainer's own verbs, or None for that of the model.
        run_id: Tells the checkpoints of this run from others in the same folder; kept when the run is resumed.
        saver: Where and how checkpoints are kept, or None.
        meter: The training metrics of the running epoch.
        stop_reason: Why training ends, or None.
        signal: The signal that asked for it, or None.
        share: Which of the batches are this process's.
        stays_here: Whether runs begin in this process, whatever a layer would launch: what is looked at is here.
        is_main: Whether this process writes, shows and tells; with several, the first of them alone.
        peers: The processes that write and read checkpoints together, where each holds a part of the state; else None.
        has_peers: Whether a wish to stop waits until every process of the run knows of it.
        wish: Why this process was asked to stop, and by which signal, before all know of it.
        participants: Further objects whose state is kept in checkpoints, by name.
    """

    __slots__ = (
        "callbacks",
        "checked",
        "client_id",
        "client_state",
        "closure",
        "config",
        "current_round",
        "data",
        "device",
        "has_peers",
        "history",
        "interrupted",
        "is_fleet",
        "is_main",
        "is_personal",
        "loss_is_default",
        "meter",
        "metrics",
        "metrics_are_default",
        "model",
        "needs_closure",
        "notes",
        "num_items",
        "optimizers",
        "participants",
        "peers",
        "phases",
        "plan",
        "precision",
        "progress",
        "received",
        "run_id",
        "saver",
        "schedulers",
        "share",
        "signal",
        "stage",
        "state",
        "stays",
        "stays_here",
        "stop_reason",
        "trainer",
        "validated_at",
        "validation",
        "window",
        "wish",
        "working",
    )

    def __init__(self, model: nn.Module | None = None, device: torch.device | None = None) -> None:
        self.trainer: Trainer | None = None
        self.model = model
        self.device = device or torch.device("cpu")
        self.stage: Stage = "train"
        self.config: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.client_id = 0
        self.client_state: dict[str, Any] = {}
        self.received: Mapping[str, Any] = {}
        self.stays: frozenset[str] = frozenset()
        self.current_round = 0
        self.phases: tuple[Phase, ...] = (Phase(0),)
        self.is_personal = False
        self.is_fleet = False
        self.working: Any = 1.0
        self.progress = Progress()
        self.history = History()
        self.callbacks = Callbacks()
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[BoundScheduler] = []
        self.metrics: dict[str, Metric] = {}
        self.loss_is_default = False
        self.metrics_are_default = False
        self.window = Window()
        self.num_items: Any = 0
        self.data: dict[str, Any] = {}
        self.plan: Plan | None = None
        self.precision: Precision | None = None
        self.run_id = ""
        self.saver: Saver | None = None
        self.meter = Meter()
        self.notes = _Notes()
        self.stop_reason: str | None = None
        self.signal: int | None = None
        self.share = Share()
        self.stays_here = False
        self.is_main = True
        self.peers: Peers | None = None
        self.has_peers = False
        self.wish: tuple[str, int | None] | None = None
        self.participants: dict[str, Stateful] = {}
        self.interrupted = False
        self.checked = Progress()
        self.validated_at = -1
        self.validation: dict[str, float] = {}
        self.needs_closure = False
        # Runs forward and backward of the running batch again, for optimizers such as LBFGS that ask for it.
        self.closure: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Made anew where a copy is used: optimizers, schedulers and loaders, and what only a running batch has.
        made = {"optimizers": [], "schedulers": [], "notes": _Notes(), "closure": None}
        shared = {name: value for name, value in self.state.items() if name != "train_loader"}
        return {name: getattr(self, name) for name in self.__slots__} | made | {"state": shared}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, else the last one that ran, counted from 1 (plato's count); 1 before the first."""
        is_inside = self.notes.is_in_epoch or self.progress.batch > 0
        return max(self.progress.epoch + is_inside, 1)

    @property
    def phase(self) -> Phase:
        """The phase of the running epoch; the last one, when all are over."""
        ends = accumulate(phase.epochs for phase in self.phases)
        return next(
            (it for it, end in zip(self.phases, ends, strict=True) if self.progress.epoch < end), self.phases[-1]
        )

    @property
    def phase_begins(self) -> bool:
        """Whether the running epoch is the first of its phase."""
        return self.progress.epoch in accumulate((phase.epochs for phase in self.phases[:-1]), initial=0)

    def each(self, function: Callable[..., _R], *rows: Any) -> _R:
        """Call a function of tensors and dictionaries of them; in a fleet, for each member with its rows.

        Example:
            >>> def length(weights):
            ...     return sum(value.square().sum() for value in weights.values()).sqrt()
            >>> context = TrainingContext()
            >>> context.each(length, {"w": torch.tensor([3.0, 4.0])})
            tensor(5.)
            >>> context.is_fleet = True
            >>> context.each(length, {"w": torch.tensor([[3.0, 4.0], [6.0, 8.0]])})
            tensor([ 5., 10.])
        """
        return vmap(function)(*rows) if self.is_fleet else function(*rows)

    @property
    def personalizes(self) -> bool:
        """Whether the running round comes after all rounds: clients train for themselves, and nothing is sent."""
        return self.current_round > float(self.config.get("rounds", math.inf))

    @contextmanager
    def personally(self) -> Iterator[None]:
        """Compute something for a client's own model: what belongs to the model that it sends is left out."""
        before, self.is_personal = self.is_personal, True
        try:
            yield
        finally:
            self.is_personal = before

    @property
    def optimizer(self) -> Optimizer | None:
        """The first optimizer, for the usual case of one."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def updated(self) -> bool:
        """Whether the running batch made a real optimizer step."""
        return bool(self.notes.stepped)

    def stop(self, reason: str, signal: int | None = None) -> None:
        """Ask training to end after the running update, in every process of the run; the first reason is kept.

        Args:
            reason: Why.
            signal: The signal that asks for it, if one does.
        """
        if self.has_peers:
            self.wish = self.wish or (reason, signal)
        else:
            self.end(reason, signal)

    def end(self, reason: str, signal: int | None = None) -> None:
        """Make training end after the running update; whoever calls this does so in every process."""
        if self.stop_reason is None:
            self.stop_reason = reason
        self.signal = self.signal or signal

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate a loss through every layer of the trainer.

        A `train_step` that calls this owns its optimisation: the loop then leaves backward and step to it.

        Args:
            loss: A scalar, normalised per batch.
            kwargs: What `Tensor.backward` takes: `retain_graph`, `create_graph`, `inputs`.
        """
        notes, window = self.notes, self.window
        if window.size > 1:
            loss = loss * window.weight(self.num_items, first_of_batch=not notes.optimized)
        notes.optimized = True
        assert self.trainer is not None, _NOT_RUNNING
        self.trainer.backward(loss, **kwargs)

    def note_update(self, optimizer: Optimizer) -> None:
        """Tell the loop that `train_step` made a whole update without the verbs, as a compiled graph does."""
        self.notes.optimized = True
        self.notes.stepped.append(optimizer)

    def step(self, *optimizers: Optimizer, zero_grad: bool = True) -> bool:
        """Clip and step optimizers, all of them by default, when the accumulation window closes.

        Args:
            optimizers: Which ones; the order is kept.
            zero_grad: Clear the gradients of a stepped optimizer, so that a further loss of the same batch starts
                from nothing.

        Returns:
            Whether any optimizer made a real step. False inside a window and when a scaler skipped.
        """
        chosen = optimizers or tuple(self.optimizers)
        window = self.window
        if not window.closes:
            window.defer(chosen)
            return False
        trainer, stepped = self.trainer, self.notes.stepped
        assert trainer is not None, _NOT_RUNNING
        before = len(stepped)
        for optimizer in chosen:
            if window.size > 1:
                window.settle(optimizer)
            trainer.clip_gradients(optimizer)
            for hook in self.callbacks.on_gradients:
                hook(self, optimizer)
            if trainer.optimizer_step(optimizer):
                stepped.append(optimizer)
            if zero_grad:
                clear_gradients(optimizer)
        return len(stepped) > before


def clear_gradients(optimizer: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters, as `optimizer.zero_grad()` does, at a third of its cost."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
