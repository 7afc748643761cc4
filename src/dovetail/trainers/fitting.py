"""Compatibility check of a checkpoint with a trainer: the error names the first difference.

The checksums of a checkpoint prove that its files are unchanged, not that a trainer can use them. Therefore `restore`
restores every section of a state, and turns a failure into one sentence with the key of the section.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from dovetail.errors import CheckpointError, DovetailError, add_note
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.optimizers import is_elementwise

_LIBRARIES = {"dovetail", "torch", "numpy", *sys.stdlib_module_names}


@contextmanager
def restoring(key: str) -> Iterator[None]:
    """Name a section of a state in the errors of restoring it.

    An error of the library or of torch becomes a CheckpointError. An error in a user's code, or of the file system,
    keeps its type and traceback and gets a note.

    Raises:
        CheckpointError: The section has an unexpected form.
    """
    try:
        yield
    # A DovetailError already names its key. A Warning is raised if the user has turned warnings into errors.
    except (DovetailError, Warning):
        raise
    except Exception as error:
        if isinstance(error, (OSError, MemoryError)) or not _is_of_library(error.__traceback__):
            add_note(error, f"raised while {key} was restored from a checkpoint")
            raise
        missing = isinstance(error, KeyError) and bool(error.args)
        reason = f"it lacks {error.args[0]!r}" if missing else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{key}: the state cannot be restored: {_short(reason)}") from error


def restore(state: Any, key: str, load: Callable[[Any], Any], template: Any = None) -> Any:
    """Pass one section of a state to `load`, and return its result.

    Args:
        state: The whole state.
        key: The section.
        load: Restores the section.
        template: A state of the expected form for a comparison; None means no comparison.

    Raises:
        CheckpointError: The section is missing or has another form.
    """
    with restoring(key):
        check_kind(template, state[key], key)
        return load(state[key])


def is_library_code(method: Any) -> bool:
    """Return whether a method belongs to this library or to torch, not to a user."""
    return str(getattr(method, "__module__", "")).partition(".")[0] in ("dovetail", "torch")


def check_kind(template: Any, saved: Any, key: str) -> None:
    """Compare the form of a saved value with a current value; None matches everything.

    Raises:
        CheckpointError: One is a number, a text, a list or a mapping, and the other is not; the message has its key.
    """
    if isinstance(template, Mapping):
        _expect(isinstance(saved, Mapping), "a mapping", saved, key)
        for name, value in template.items():
            if name in saved:
                check_kind(value, saved[name], f"{key}.{name}")
    elif isinstance(template, (list, tuple)):
        _expect(isinstance(saved, (list, tuple)), "a list", saved, key)
        # Only tuples have a fixed length: a list, such as a history, may have grown or shrunk.
        if isinstance(template, tuple) or len(template) == len(saved):
            _expect(len(template) == len(saved), f"{len(template)} values", saved, key)
            for number, (one, other) in enumerate(zip(template, saved, strict=True)):
                check_kind(one, other, f"{key}.{number}")
    # Before `Real`, because Python counts a bool as a number.
    elif isinstance(template, bool):
        _expect(saved is None or isinstance(saved, (bool, np.bool_)), "true or false", saved, key)
    elif isinstance(template, Real):
        is_scalar = isinstance(saved, Tensor) and saved.numel() == 1
        _expect(is_scalar or (isinstance(saved, Real) and not isinstance(saved, bool)), "a number", saved, key)
    elif isinstance(template, str):
        _expect(isinstance(saved, str), "text", saved, key)
    elif isinstance(template, Tensor):
        _expect(isinstance(saved, (Tensor, Real)), "a tensor", saved, key)


def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any], key: str) -> None:
    """Restore an optimizer, and check the values that torch would use unchecked in the next step.

    Raises:
        CheckpointError: A setting or a tensor has an unexpected form.
    """
    with restoring(key):
        # Copied, because `load_state_dict` replaces the groups.
        before = [dict(group) for group in optimizer.param_groups]
        for number, (group, saved) in enumerate(zip(before, state["param_groups"], strict=True)):
            settings = {name: value for name, value in group.items() if name != "params"}
            check_kind(settings, saved, f"{key}.param_groups.{number}")
        check_kind({}, state["state"], f"{key}.state")
        optimizer.load_state_dict(dict(state))
        for number, (group, now) in enumerate(zip(before, optimizer.param_groups, strict=True)):
            # Torch takes the saved groups as they are: a missing setting would be a KeyError in the next step.
            if lost := sorted(str(name) for name in group.keys() - now.keys()):
                raise CheckpointError(
                    f"{key}.param_groups.{number}: the state cannot be restored: it lacks {lost[0]!r}"
                )
        if is_elementwise(optimizer):
            _check_elementwise(optimizer, key)


# Entries of the state that are numbers.
_NUMBERS = {"step", "eta", "mu", "mu_product"}


def _check_elementwise(optimizer: Optimizer, key: str) -> None:
    """Raise if the state of a parameter lacks an entry, or if a tensor in it does not have the parameter's shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {number: optimizer.state[it] for number, it in enumerate(parameters) if it in optimizer.state}
    names = {name for state in states.values() if isinstance(state, Mapping) for name in state}
    for number, state in states.items():
        place, shape = f"{key}.state.{number}", tuple(parameters[number].shape)
        check_kind({}, state, place)
        for name in sorted(names, key=str):
            if name not in state:
                raise CheckpointError(f"{place}: the state cannot be restored: it lacks {name!r}")
            value = state[name]
            if name in _NUMBERS:
                check_kind(0.0, value, f"{place}.{name}")
            # SGD has no momentum before its first step.
            elif value is not None or name != "momentum_buffer":
                fits = isinstance(value, Tensor) and tuple(value.shape) == shape
                _expect(fits, f"a tensor of shape {shape}", value, f"{place}.{name}")


def _expect(fits: bool, expected: str, saved: Any, key: str) -> None:
    if not fits:
        raise CheckpointError(f"{key}: the state cannot be restored: expected {expected}, got {_kind(saved)}")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_of_library(traceback: TracebackType | None) -> bool:
    """Return whether the traceback of an error contains only code of the library, torch and Python."""
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _LIBRARIES:
            return False
        traceback = traceback.tb_next
    return True


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}…"


def kinds_of(context: TrainingContext) -> dict[str, list[str]]:
    """Return the class names of optimizers and schedulers; they are only compared, never imported."""
    return {
        "optimizer": [type(optimizer).__name__ for optimizer in context.optimizers],
        "scheduler": [type(bound.scheduler).__name__ for bound in context.schedulers],
    }


def check_fits(context: TrainingContext, state: Mapping[str, Any]) -> None:
    """Raise if a state is of another model, optimizer or schedule, before anything is restored.

    Raises:
        CheckpointError: The message names the first difference.
    """
    assert context.model is not None
    model, kinds = context.model.state_dict(), kinds_of(context)
    groups = [optimizer.state_dict() for optimizer in context.optimizers]
    difference = (
        restore(state, "model", lambda saved: weights_difference(saved, model), {})
        or restore(state, "kinds", lambda saved: _first_kind_difference(saved, kinds), {})
        or restore(state, "optimizers", lambda saved: _first_group_difference(saved, groups), [])
    )
    if difference is not None:
        raise CheckpointError(
            f"the checkpoint does not fit the trainer: {difference}; build the trainer as before, or choose another "
            "checkpoint_dir"
        )


def weights_difference(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Return the first difference between saved weights and the weights of the model, or None."""
    for name, value in saved.items():
        if name not in present:
            return f"it has {name!r}, which the model lacks"
        if not isinstance(value, Tensor) or not isinstance(present[name], Tensor):
            # `get_extra_state` of a module may return any object.
            if isinstance(value, Tensor) != isinstance(present[name], Tensor):
                return f"{name!r} is {_kind(value)} in it and {_kind(present[name])} in the model"
            continue
        if tuple(value.shape) != tuple(present[name].shape):
            return f"{name!r} has shape {tuple(value.shape)} in it and {tuple(present[name].shape)} in the model"
        if value.dtype != present[name].dtype:
            return f"{name!r} is {value.dtype} in it and {present[name].dtype} in the model"
    missing = next((name for name in present if name not in saved), None)
    return None if missing is None else f"it lacks {missing!r}, which the model has"


def _first_kind_difference(saved: Mapping[str, Sequence[str]], present: Mapping[str, Sequence[str]]) -> str | None:
    for role, names in present.items():
        check_kind(["" for _ in saved[role]], saved[role], f"kinds.{role}")
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
