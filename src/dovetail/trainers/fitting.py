"""Whether a checkpoint's state fits a trainer, and if not, the first thing that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import CheckpointError
from dovetail.trainers.context import TrainingContext

__all__ = ["check_fits", "kinds_of", "weights_difference"]


def kinds_of(context: TrainingContext) -> dict[str, list[str]]:
    """Return the class names of optimizers and schedulers, to be compared, never imported."""
    return {
        "optimizer": [type(optimizer).__name__ for optimizer in context.optimizers],
        "scheduler": [type(bound.scheduler).__name__ for bound in context.schedulers],
    }


def check_fits(context: TrainingContext, state: Mapping[str, Any]) -> None:
    """Refuse the state of another model, optimizer or schedule before any of it is taken.

    Raises:
        CheckpointError: The first difference, in one sentence.
    """
    assert context.model is not None
    difference = (
        weights_difference(state["model"], context.model.state_dict())
        or _first_kind_difference(state["kinds"], kinds_of(context))
        or _first_group_difference(state["optimizers"], [optimizer.state_dict() for optimizer in context.optimizers])
    )
    if difference is not None:
        raise CheckpointError(
            f"the checkpoint is of something else: {difference}; make the trainer as it was, or name another "
            "checkpoint_dir"
        )


def weights_difference(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Return the first thing in which saved weights are not those of the model, or None."""
    for name, value in saved.items():
        if name not in present:
            return f"it has {name!r}, which the model lacks"
        if tuple(value.shape) != tuple(present[name].shape):
            return f"{name!r} has shape {tuple(value.shape)} in it and {tuple(present[name].shape)} in the model"
        if value.dtype != present[name].dtype:
            return f"{name!r} is {value.dtype} in it and {present[name].dtype} in the model"
    missing = next((name for name in present if name not in saved), None)
    return None if missing is None else f"it lacks {missing!r}, which the model has"


def _first_kind_difference(saved: Mapping[str, Sequence[str]], present: Mapping[str, Sequence[str]]) -> str | None:
    for role, names in present.items():
        if list(saved[role]) != list(names):
            return f"its {role}s are {_listed(saved[role])}, the trainer's are {_listed(names)}"
    return None


def _first_group_difference(saved: Sequence[Any], present: Sequence[Any]) -> str | None:
    for number, (one, other) in enumerate(zip(saved, present, strict=True), start=1):
        sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (one, other)]
        if sizes[0] != sizes[1]:
            return f"optimizer {number} has groups of {sizes[0]} parameters in it and of {sizes[1]} in the trainer"
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
