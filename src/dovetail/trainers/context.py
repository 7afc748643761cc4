"""Training context: the state that layers, strategies and callbacks share during a run.

User code calls `context.backward(loss)` and `context.step(optimizer)`; the context calls the verbs of the outermost
layer of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.callbacks.base import Callbacks
from dovetail.client import ClientContext
from dovetail.errors import ConfigError
from dovetail.history import History
from dovetail.trainers.bound_scheduler import BoundScheduler, Interval
from dovetail.trainers.precision import Precision
from dovetail.trainers.run_state import BatchState, Phase, Plan, ProcessState, RunState, Stage, Stateful
from dovetail.trainers.window import Window
from dovetail.units import Progress

__all__ = [
    "BatchState",
    "BoundScheduler",
    "Interval",
    "Phase",
    "Plan",
    "ProcessState",
    "RunState",
    "Stage",
    "Stateful",
    "TrainingContext",
    "Window",
    "attached_objects",
]

_NOT_RUNNING = "the context calls the trainer only while fit, evaluate or predict runs"


class TrainingContext:
    """The shared state of a run, and the path from user code to the outermost layer.

    Attributes:
        model: The module that is trained.
        device: The device to which batches are moved.
        optimizers: The optimizers, in the order in which the loop steps them. In a new run they are built when they
            are first read: after the `on_train_start` of strategies, unless a strategy reads them there.
        schedulers: The learning-rate schedulers with their intervals, which are built with the optimizers.
        precision: Mixed precision of the trainer's verbs; None means the precision of the model.
        stage: The running stage: train, valid, test or predict.
        progress: Epochs, batches, records and updates so far.
        history: The record of the run.
        callbacks: The registered callbacks, in call order.
        config: Settings that strategies and plato's hooks read.
        state: A dictionary that strategies share.
        client: The client that the trainer works for: an object that another package defines and reads. The kernel
            stores its state in checkpoints.
        process: The role of this process in a run of several processes.
        run: The state that the loop keeps about the run.
    """

    __slots__ = (
        "_deferred",
        "callbacks",
        "client",
        "config",
        "device",
        "history",
        "model",
        "optimizers",
        "precision",
        "process",
        "progress",
        "run",
        "schedulers",
        "stage",
        "state",
    )

    def __init__(self, model: nn.Module | None = None, device: torch.device | None = None) -> None:
        self.model = model
        self.device = device or torch.device("cpu")
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[BoundScheduler] = []
        self.precision: Precision | None = None
        self.stage: Stage = "train"
        self.progress = Progress()
        self.history = History()
        self.callbacks = Callbacks()
        self.config: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.client = ClientContext()
        self.process = ProcessState()
        self.run = RunState()
        self._deferred: tuple[Callable[[], None], list[Optimizer], list[BoundScheduler]] | None = None

    def __repr__(self) -> str:
        return (
            f"TrainingContext(client_id={self.client_id}, current_epoch={self.current_epoch}, "
            f"current_round={self.current_round}, model={type(self.model).__name__}, device={self.device})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process builds optimizers, schedulers and loaders itself.
        shared = {name: value for name, value in self.state.items() if name != "train_loader"}
        fresh: dict[str, Any] = {"optimizers": [], "schedulers": [], "state": shared, "_deferred": None}
        return {name: getattr(self, name) for name in self.__slots__ if name not in fresh} | fresh

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    # Hidden from type checkers, which would otherwise accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Python calls this only while a slot is empty, so reading an optimizer costs nothing once it is built.
            if name in ("optimizers", "schedulers") and (build := stop_deferring(self)) is not None:
                build()
                return getattr(self, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def client_id(self) -> int:
        """The number of the client that the trainer works for, under plato's name; 0 if there is none."""
        return self.client.id

    @client_id.setter
    def client_id(self, value: int) -> None:
        self.client.id = value

    @property
    def current_epoch(self) -> int:
        """The running epoch, else the last one that ran, counted from 1 as plato does; 1 before the first."""
        is_inside = self.run.is_in_epoch or self.progress.batch > 0
        return max(self.progress.epoch + is_inside, 1)

    @current_epoch.setter
    def current_epoch(self, value: int) -> None:
        if self.run.trainer is not None:
            raise ConfigError("current_epoch: the loop counts the epochs of a run; set it before or after")
        self.progress.epoch, self.progress.batch = value, 0

    @property
    def current_round(self) -> int:
        """The number of the round that the run is a part of, under plato's name; 0 if there is none."""
        return self.client.round

    @current_round.setter
    def current_round(self, value: int) -> None:
        self.client.round = value

    def stop(self, reason: str, signal: int | None = None) -> None:
        """End training after the running update, in every process of the run; the first reason is kept.

        Args:
            reason: Why training ends, for the history and the display.
            signal: The signal that requested the stop, or None.
        """
        if self.process.has_peers:
            self.run.stop_request = self.run.stop_request or (reason, signal)
        else:
            self.run.end(reason, signal)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate a loss through every layer of the trainer.

        A `train_step` that calls this optimizes by hand: the loop then calls neither backward nor step.

        Args:
            loss: A scalar, normalised per batch.
            kwargs: Arguments of `Tensor.backward`: `retain_graph`, `create_graph`, `inputs`.
        """
        run = self.run
        batch, window = run.batch, run.window
        # A batch may have several losses, as in a GAN; its items count once.
        if window.size > 1:
            loss = loss * window.weight(run.num_items, first_of_batch=not batch.optimized)
        batch.optimized = True
        assert run.trainer is not None, _NOT_RUNNING
        run.trainer.backward(loss, **kwargs)

    def step(self, *optimizers: Optimizer, zero_grad: bool = True) -> bool:
        """Clip and step optimizers, all of them by default, when the accumulation window closes.

        Args:
            optimizers: Which ones; the order is kept.
            zero_grad: Clear the gradients of a stepped optimizer, so that another loss of the same batch starts from
                zero. False keeps them: the gradients of the other loss are added, and the next step has their sum.

        Returns:
            Whether any optimizer made a real step. False inside a window and when a scaler skipped.
        """
        chosen = optimizers or tuple(self.optimizers)
        run = self.run
        window = run.window
        # The loop makes this step when the window closes.
        if not window.closes:
            window.defer(chosen)
            return False
        trainer, stepped = run.trainer, run.batch.stepped
        assert trainer is not None, _NOT_RUNNING
        before = len(stepped)
        for optimizer in chosen:
            # Before clipping, which must see the gradients of the whole window.
            if window.size > 1:
                window.settle(optimizer)
            trainer.clip_gradients(optimizer)
            for hook in self.callbacks.on_gradients:
                hook(self, optimizer)
            if trainer.optimizer_step(optimizer):
                stepped.append(optimizer)
            if zero_grad:
                clear_gradients(optimizer)
            elif run.batch.optimized and window.size > 1:
                window.keep(optimizer)
        return len(stepped) > before


def attached_objects(context: TrainingContext) -> dict[str, ClientContext]:
    """Return the objects that other packages attach to a context, by the name of their section in a checkpoint.

    The trainer stores and restores their state, and reads nothing else of them.
    """
    return {"client_state": context.client}


def defer_optimizers(context: TrainingContext, build: Callable[[], None]) -> None:
    """Call `build` when the optimizers or schedulers of a context are first read; the context must have none yet.

    Until then strategies can prepare, in `on_train_start`, the inputs of the loader, the optimizer and the schedule.
    """
    context._deferred = build, context.optimizers, context.schedulers
    # Empty slots: the next read calls `__getattr__`, which builds.
    del context.optimizers, context.schedulers


def stop_deferring(context: TrainingContext) -> Callable[[], None] | None:
    """Undo `defer_optimizers` and return the function given to it; None if no build is pending."""
    if context._deferred is None:
        return None
    build, context.optimizers, context.schedulers = context._deferred
    context._deferred = None
    return build


def clear_gradients(optimizer: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters, as `optimizer.zero_grad()` does, at a third of its cost."""
    # A class with its own `zero_grad` may clear more than gradients.
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
