"""Reasons against a compiled step, against a graph that makes the update, and against several steps per call."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dovetail.trainers.base import Trainer
from dovetail.trainers.capabilities.sharded import ShardedDataParallel
from dovetail.trainers.capabilities.timed import Timed
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.precision import Precision
from dovetail.trainers.whole_step import CannotCompileError
from dovetail.units import Progress

Kinds = tuple[type[Any], ...]


def graph_obstacle(context: TrainingContext, trainer: Trainer, compiled: type[Any], transparent: Kinds) -> str | None:
    """Return why a run cannot use a graph, or None.

    Args:
        context: The context of the run.
        trainer: The outermost layer.
        compiled: The class of the layer that compiles.
        transparent: Classes whose verbs add nothing that a graph would miss.
    """
    if context.run.needs_closure:
        return f"the optimizer {type(context.optimizers[0]).__name__} evaluates the loss itself"
    if len(context.run.phases) > 1 or context.run.phase_at(context.progress.epoch).is_detached:
        return "the run has phases, which train different parameters"
    if ShardedDataParallel in trainer._customized_by("backward"):
        return "ShardedDataParallel gathers weights while a step runs; mode='model' compiles its blocks"
    first = next(cls for cls in trainer._customized_by("train_step") if cls is not Timed)
    if first is not compiled:
        return f"{first.__name__} changes what train_step returns; put it inside"
    return own_verb(trainer, transparent, "backward")


def split_reason(context: TrainingContext, strategies: Any, trainer: Trainer, transparent: Kinds) -> str | None:
    """Return why gradients must leave the graph before the update, or None; for the arguments see `graph_obstacle`."""
    if context.run.window.size > 1:
        return f"{context.run.window.size} batches share one update"
    if len(context.optimizers) != 1:
        return f"there are {len(context.optimizers)} optimizers"
    if context.precision is not None and context.precision.scaler is not None:
        return "a scaled loss may skip an update"
    if context.process.has_peers:
        return "several processes share an update"
    for strategy in strategies.overriding("on_gradients"):
        return f"{type(strategy).__name__} has a hook for gradients"
    for hook in context.callbacks.on_gradients:
        return f"{_owner(hook)} has a hook for gradients"
    return own_verb(trainer, transparent, "clip_gradients", "optimizer_step")


def single_step_reason(context: TrainingContext, trainer: Trainer, transparent: Kinds) -> str | None:
    """Return why every step must be a separate call, or None; for the arguments see `graph_obstacle`."""
    callbacks = context.callbacks
    for hook in (*callbacks.on_step_start, *callbacks.on_update, *callbacks.on_step_end):
        return f"{_owner(hook)} has a hook for every step"
    for bound in context.schedulers:
        if bound.interval != "epoch":
            return f"a schedule moves at every {bound.interval}"
    return own_verb(trainer, transparent, "scheduler_step", "after_step")


def own_verb(trainer: Trainer, transparent: Kinds, *verbs: str) -> str | None:
    """Return a message if a class overrides one of some verbs that the graph replaces, else None."""
    for verb in verbs:
        for cls in trainer._customized_by(verb):
            if cls not in transparent:
                return f"{cls.__name__} has its own {verb}"
    return None


def has_own_step_function(layer: Trainer) -> bool:
    """Return whether a trainer has a step that the user gave or assigned."""
    own = vars(layer)
    return own.get("train_step") is not None or own.get("_train_step") is not None


class NoCounters:
    """Replaces the progress while a step is traced: a step that reads a counter of batches or updates raises.

    The epoch may be read: the loss is compared with an eager one in every epoch.

    Args:
        progress: The progress.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        # The library's own steps store the number of the batch for strategies.
        is_ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("dovetail.")
        if name == "epoch" or is_ours:
            return getattr(self._progress, name)
        raise CannotCompileError(f"the step reads context.progress.{name}, which a graph would not read again")


def trained_by(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters of some optimizers, each once."""
    found = [it for optimizer in optimizers for group in optimizer.param_groups for it in group["params"]]
    return list(dict.fromkeys(found))


def full_precision(precision: Precision | None) -> AbstractContextManager[Any]:
    """Return a context manager that ends the autocast of the loop: a graph contains its own."""
    return nullcontext() if precision is None else torch.autocast(precision.device_type, enabled=False)


def _owner(hook: Any) -> str:
    return type(getattr(hook, "__self__", hook)).__name__
