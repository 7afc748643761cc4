"""Scope of a run: setup and teardown of a trainer, evaluation without side effects, and temporary data of stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dovetail.errors import add_note
from dovetail.trainers.context import Stage, TrainingContext
from dovetail.trainers.randomness import rng_state, set_rng_state

if TYPE_CHECKING:
    from dovetail.trainers.base import Trainer


@contextmanager
def running(trainer: Trainer, stage: Stage) -> Iterator[None]:
    """Make `trainer` the outermost layer from setup to teardown; inside a running `fit` do nothing."""
    context = trainer.context
    # `evaluate` or `predict` was called inside of a run, which has its own setup and teardown.
    if context.run.trainer is not None:
        yield
        return
    context.run.trainer, context.stage = trainer, stage
    failure: BaseException | None = None
    is_ready = False
    try:
        trainer.setup()
        is_ready = True
        yield
    except BaseException as error:
        failure = error
        # An error in `setup` has no position in the data.
        if is_ready:
            _note_place(context, stage, error)
        if isinstance(error, NotImplementedError) and "training_step" in dir(context.model):
            add_note(error, _LIGHTNING)
        for on_exception in context.callbacks.on_exception:
            on_exception(context, error)
        raise
    finally:
        try:
            trainer.teardown(failure)
        finally:
            # Also if teardown fails: otherwise the next `fit` would find a running trainer and skip its setup.
            context.run.trainer, context.run.closure = None, None
            context.run.batch.stepped.clear()
            context.run.is_in_epoch = False


@contextmanager
def evaluating(context: TrainingContext, stage: Stage) -> Iterator[None]:
    """Compute without gradients in evaluation mode; restore the modes of all modules, the stage and the RNG state."""
    model, stage_before = context.model, context.stage
    modes = [(module, module.training) for module in model.modules()] if model is not None else []
    randomness = rng_state()
    context.stage = stage
    if model is not None:
        model.eval()
    try:
        # Not inference_mode: a model or a metric may store a tensor of this pass and train with it or change it later.
        with torch.no_grad():
            yield
    except BaseException as error:
        # Here, because outside of this function the stage is again the training stage.
        _note_place(context, stage, error)
        raise
    finally:
        context.stage = stage_before
        # One by one: `model.train()` would also switch submodules that the user put in evaluation mode.
        for module, training in modes:
            module.training = training
        set_rng_state(randomness)


@contextmanager
def custom_evaluation(trainer: Trainer, stage: Stage = "test", data: Any = None) -> Iterator[None]:
    """Prepare a trainer for a pass over data that the caller computes; the state of training does not change."""
    context = trainer.context
    with ExitStack() as stack:
        # In this order: setup places the model, and evaluation mode follows.
        for state in (lend_data(context, stage, data), running(trainer, stage), evaluating(context, stage)):
            stack.enter_context(state)
        # The precision is known once the trainer is set up.
        if context.precision is not None:
            stack.enter_context(context.precision.autocast())
        yield


def set_data(context: TrainingContext, **data: Any) -> None:
    """Set the data of stages, by stage; None keeps the current data."""
    context.run.data.update({stage: source for stage, source in data.items() if source is not None})


@contextmanager
def lend_data(context: TrainingContext, stage: Stage, data: Any) -> Iterator[None]:
    """Set the data of a stage, and restore the previous data afterwards."""
    before = context.run.data.get(stage)
    set_data(context, **{stage: data})
    try:
        yield
    finally:
        context.run.data[stage] = before


@contextmanager
def reading_set(context: TrainingContext, stage: Stage, name: str, data: Any) -> Iterator[None]:
    """Make one of the data sets of a stage the data of the stage, and restore all of them afterwards."""
    run = context.run
    before, run.data[stage], run.data_set = run.data.get(stage), data, name
    try:
        yield
    finally:
        run.data[stage], run.data_set = before, ""


def _note_place(context: TrainingContext, stage: Stage, error: BaseException) -> None:
    """Add the position in the run to an error, unless a pass inside the run has done so."""
    if any(note.startswith("while ") for note in getattr(error, "__notes__", ())):
        return
    run, progress = context.run, context.progress
    place = ""
    if run.plan is not None and context.run.trainer is not None and stage in ("train", "valid"):
        if run.is_in_epoch:
            place = f": epoch {progress.epoch + 1}, batch {run.batch.number + 1}"
        else:
            place = f" after epoch {progress.epoch}" if progress.epoch else " before the first epoch"
    add_note(error, f"while {_DOING[stage]}{place}")


# A LightningModule without `forward` raises NotImplementedError when it is called.
_LIGHTNING = (
    "the trainer calls the model's forward, and never its training_step: docs/migration/lightning.md shows what a "
    "LightningModule becomes"
)

_DOING = {"train": "training", "valid": "validating", "test": "testing", "predict": "predicting"}
