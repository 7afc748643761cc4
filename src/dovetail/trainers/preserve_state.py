"""Context managers that restore a trainer: its attributes, or its whole state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from dovetail.callbacks import Callback
from dovetail.data import DataLoader, StreamLoader
from dovetail.data.named_sets import named_sets
from dovetail.history import History
from dovetail.trainers.base import Trainer
from dovetail.trainers.context import Stage, Stateful, TrainingContext, attached_objects
from dovetail.trainers.metrics import Meter
from dovetail.trainers.randomness import rng_state, set_rng_state
from dovetail.trainers.run_scope import reading_set
from dovetail.trainers.strategies.base import Strategy
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.trainers.strategies.nesting import Nesting

if TYPE_CHECKING:
    from dovetail.trainers.single_process import SingleProcessTrainer


def layers(trainer: Trainer) -> list[Trainer]:
    """Return a trainer and the trainers that it decorates, the outermost first."""
    found = [trainer]
    while isinstance(inner := vars(found[-1]).get("trainer"), Trainer):
        found.append(inner)
    return found


def strategies_of(trainer: Trainer) -> Strategies | tuple[Strategy, ...]:
    """Return the strategies of the innermost layer; an empty tuple for a trainer of another kind."""
    found = vars(trainer.core).get("strategies")
    return found if isinstance(found, Strategies) else ()


def own_callbacks(context: TrainingContext) -> list[Callback]:
    """Return the callbacks that call hooks of the strategies and of the trainer's own class."""
    return [it for it in context.callbacks if it.is_part_of_trainer]


def with_parts(strategies: Iterable[Strategy]) -> Iterator[Strategy]:
    """Yield strategies, each followed by the strategies inside it."""
    for strategy in strategies:
        yield strategy
        if isinstance(strategy, Nesting):
            yield from with_parts(strategy.parts)


@contextmanager
def preserve_attributes(trainer: Trainer) -> Iterator[None]:
    """Restore every attribute of the layers, the strategies and the context, and the RNG state.

    The contents of lists and dictionaries are restored, too. Changes inside other objects, such as the weights of the
    model, remain; use `preserve_state` to restore them.
    """
    context, randomness = trainer.context, rng_state()
    parts: list[Any] = [context, context.run, context.process, *attached_objects(context).values()]
    slots = [_save_attributes({name: getattr(part, name) for name in part.__slots__}) for part in parts]
    own = [it for name in ("_data", "options") if (it := vars(trainer.core).get(name)) is not None]
    owners = [*layers(trainer), *with_parts(strategies_of(trainer)), *own]
    attributes = [(owner, _save_attributes(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for part, saved in zip(parts, slots, strict=True):
            for name, value in _restore_containers(saved).items():
                setattr(part, name, value)
        for owner, saved in attributes:
            # Not with setattr: most strategies are frozen.
            vars(owner).clear()
            vars(owner).update(_restore_containers(saved))
        set_rng_state(randomness)


@contextmanager
def preserve_state(trainer: Trainer, **data: Any) -> Iterator[None]:
    """Restore the whole state of a trainer that has a model: everything in a checkpoint, and more.

    Inside, history and meter are new, and nothing is saved.

    Args:
        trainer: The outermost layer.
        data: Temporary data by stage; None means the data that the trainer already has.
    """
    context, model, randomness = trainer.context, trainer.context.model, rng_state()
    assert model is not None
    # Build the optimizer now, so that there is a state to restore.
    _ = getattr(trainer.core, "optimizer", None)
    set_rng_state(randomness)
    with preserve_attributes(trainer):
        context.run.data.update({stage: source for stage, source in data.items() if source is not None})
        state = copy.deepcopy(trainer.state_dict())
        sources = [source for stage in _READ_IN_TRAINING for source in _random_sources(trainer, stage)]
        modes = [(module, module.training) for module in model.modules()]
        # References are enough: the loop replaces gradients and does not clear them in place.
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        # The state of a model does not include buffers that are not persistent.
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        callbacks, schedulers = context.callbacks, context.schedulers
        context.history, context.run.meter, context.run.saver = History(), Meter(), None
        # Otherwise the launcher of a layer would start processes for the trial.
        context.process.stays_here = True
        # Copies, because an error would leave these in the middle of a window.
        context.run.window, context.run.batch = copy.deepcopy((context.run.window, context.run.batch))
        try:
            yield
        finally:
            context.callbacks, context.schedulers = callbacks, schedulers
            # Not the real history: it has not changed, and loading would write its file again.
            context.history, context.run.meter, context.run.saver = History(), Meter(), None
            trainer.load_state_dict(state)
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for source, source_state in sources:
                if isinstance(source, torch.Generator):
                    source.set_state(source_state)
                else:
                    source.load_state_dict(source_state)


_READ_IN_TRAINING: tuple[Stage, ...] = ("train", "valid")


def _save_attributes(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute, with a copy if it is a container."""
    return {
        name: (value, copy.copy(value) if isinstance(value, (dict, list, set)) else None)
        for name, value in attributes.items()
    }


def _restore_containers(saved: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Restore the contents of lists, dictionaries and sets, and return all attributes by name."""
    for value, content in saved.values():
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(content)
    return {name: value for name, (value, _) in saved.items()}


def _random_sources(trainer: Trainer, stage: Stage) -> Iterator[tuple[Any, Any]]:
    """Yield the generators, samplers and loaders that determine the order of a stage's data, with their states."""
    core = cast("SingleProcessTrainer", trainer.core)
    source = trainer.context.run.data.get(stage)
    if source is None:
        return
    for name, data in (named_sets(source) or {"": source}).items():
        with reading_set(trainer.context, stage, name, data):
            yield from _sources_of(core._loader(stage))


def _sources_of(loader: Any) -> Iterator[tuple[Any, Any]]:
    for drawing in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        generator = getattr(drawing, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator, generator.get_state()
        # Our own loaders have no position besides the trainer's progress.
        if isinstance(drawing, Stateful) and not isinstance(drawing, (DataLoader, StreamLoader)):
            yield drawing, copy.deepcopy(drawing.state_dict())
