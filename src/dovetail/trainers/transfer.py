"""State of a trainer that is sent to another process and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.callbacks.ema import WeightAverage
from dovetail.runtime.relay import is_storable
from dovetail.trainers.base import Trainer
from dovetail.trainers.context import Plan
from dovetail.trainers.randomness import rng_state, set_rng_state


def initial_state(trainer: Trainer, continues: bool) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the state that training starts from, which is sent with the trainer itself.

    Args:
        trainer: The trainer.
        continues: True if the run continues an earlier one. Otherwise optimizers are rebuilt from the same parts, and
            only the RNG state is needed.
    """
    return trainer.state_dict() if continues and trainer.context.optimizers else None, rng_state()


def set_initial_state(trainer: Trainer, initial: tuple[dict[str, Any] | None, dict[str, Any]]) -> None:
    """Restore the state returned by `initial_state` in the copy of the trainer in another process."""
    state, rng = initial
    if state is not None:
        trainer.load_state_dict(state)
    # Last: `load_state_dict` also sets the generators, to their states when the trainer's state was taken.
    set_rng_state(rng)


def trained_state(trainer: Trainer) -> dict[str, Any]:
    """Return the state that the caller's trainer needs to continue from this one, in a form for checkpoints."""
    context = trainer.context
    return {
        "trainer": trainer.state_dict(),
        # Strategies may store any object in `context.state`; only tensors and plain values can be sent.
        "shared": {name: value for name, value in context.state.items() if is_storable(name, value)},
        "stop_reason": context.run.stop_reason,
    }


def apply_trained_state(trainer: Trainer, plan: Plan, result: Mapping[str, Any]) -> None:
    """Restore the state returned by `trained_state` in the caller's trainer.

    Args:
        trainer: The trainer of the caller, with the data of the run.
        plan: The plan of the run.
        result: The result of `trained_state` in the other process.
    """
    context = trainer.context
    context.run.plan = plan
    trainer.load_state_dict(result["trainer"])
    context.state.update(result["shared"])
    context.run.stop_reason = result["stop_reason"]
    for callback in context.callbacks:
        if isinstance(callback, WeightAverage) and context.model is not None:
            callback.bind(context.model)
