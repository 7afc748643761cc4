"""Limits of whole-step compilation: checks of modules and optimizers, and of side effects during a trace."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dovetail.trainers.whole_step.rules import rule_of

Space = tuple[str, MutableMapping[str, Any]]


class CannotCompileError(Exception):
    """The step cannot be compiled; the message has the reason, as the end of a sentence. Nothing has changed."""


class TraceError(CannotCompileError):
    """An error inside a trace."""


class StoredTensorError(CannotCompileError):
    """The step stores a tensor of its trace."""

    def __init__(self) -> None:
        super().__init__("the step stores a tensor outside of its outputs, which a graph would not repeat")


def check_modules(
    modules: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter], *, calls_hooks: bool = False
) -> None:
    """Raise for modules that compilation does not speed up, and for hooks that a graph would not call.

    Args:
        modules: All modules.
        parameters: Their parameters by name.
        calls_hooks: True if hooks that wait for a complete gradient are called after the graph.
    """
    for module in modules:
        if isinstance(module, nn.RNNBase):
            # Inductor cannot optimize its single operation, and the unrolled layer takes a minute to compile.
            raise CannotCompileError(f"the model has a recurrent layer, {type(module).__name__}")
        for name in _HOOKS:
            for hook in vars(module).get(name, {}).values():
                raise CannotCompileError(f"a {type(module).__name__} has the hook {_name_of(hook)}")
    if any(getattr(global_hooks, f"_global{name}", None) for name in _HOOKS):
        raise CannotCompileError("all modules have a global hook")
    # A name starts with the index of its module in the root, as in `0.weight`; messages leave it out.
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            raise CannotCompileError(f"the parameter {name[2:]} is a {type(parameter).__name__}")
        if parameter.is_complex() or parameter.layout is not torch.strided:
            raise CannotCompileError(f"the parameter {name[2:]} is complex or sparse")
        if parameter._backward_hooks or (parameter._post_accumulate_grad_hooks and not calls_hooks):
            raise CannotCompileError(f"the parameter {name[2:]} has a hook on its gradient")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise for optimizers without a rule, and for settings that the rules do not support."""
    known = set(ids(parameters.values()))
    name = type(optimizer).__name__
    rule = rule_of(optimizer)
    if rule is None:
        raise CannotCompileError(f"the optimizer is {name}, whose update is not one of torch's dense ones")
    for group in optimizer.param_groups:
        # Torch does not damp the first gradient, so a momentum that starts with zeros would differ.
        if group.get("dampening"):
            raise CannotCompileError(f"the optimizer {name} has dampening")
        if group.get("differentiable"):
            raise CannotCompileError(f"the optimizer {name} is differentiable")
        settings = [group[setting] for setting in rule.settings]
        if any(isinstance(setting, Tensor) for setting in pytree.tree_leaves(settings)):
            raise CannotCompileError(f"the optimizer {name} has a tensor among its settings")
        if any(id(parameter) not in known for parameter in group["params"]):
            raise CannotCompileError(f"the optimizer {name} has a parameter that is not the model's")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise CannotCompileError(f"the optimizer {name} has a hook on its steps")


def check_memory(tensors: Sequence[Tensor]) -> None:
    """Raise if a write to one of the tensors would change another one."""
    addresses = [it.untyped_storage().data_ptr() for it in tensors if it.numel()]
    if len(set(addresses)) != len(addresses):
        raise CannotCompileError("two parameters or buffers share their memory")


@contextmanager
def reject_changes(spaces: Sequence[Space]) -> Iterator[None]:
    """Undo changes that a trace makes to objects that it should only read, and raise."""
    before = _contents(spaces)
    # A trace computes the changes in place of a tensor that is no input.
    restore = remember_values(held_tensors(spaces))
    generators, numbers = _generator_states(), (random.getstate(), np.random.get_state())
    changed, stored = [], None
    try:
        yield
    except StoredTensorError as error:
        # The name of the attribute, if it is one, says more.
        stored = error
    finally:
        restore()
        # Also after an error: the step is then computed eagerly, from the same values.
        for owner, space, old in before:
            changed += [f"{owner}.{name}" for name in _undo_changes(space, old)]
        draws = generators != _generator_states()
        if draws:
            # Otherwise the eager steps that follow would draw other numbers than those of an eager run.
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])
    if changed:
        raise CannotCompileError(f"the step changes {changed[0]}, which a graph would not repeat")
    if draws:
        raise CannotCompileError("the step draws random numbers from Python or numpy, and not from torch")
    if stored is not None:
        raise stored


@contextmanager
def undo_if_rejected(spaces: Sequence[Space]) -> Iterator[None]:
    """Undo changes to objects if the step inside is rejected: the trainer then computes the same batch again."""
    before = _contents(spaces)
    try:
        yield
    except CannotCompileError:
        for _, space, old in before:
            _undo_changes(space, old)
        raise


def _contents(spaces: Sequence[Space]) -> list[tuple[str, MutableMapping[str, Any], dict[str, Any]]]:
    """Return the owner, the space, and its present values with copies of containers, for each space."""
    return [(owner, space, {name: (it, _content(it)) for name, it in space.items()}) for owner, space in spaces]


def held_tensors(spaces: Sequence[Space]) -> Iterator[Tensor]:
    """Return the tensors among attributes and variables that a step may change in place."""
    for value in (it for _, space in spaces for it in space.values()):
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if is_plain and value.nbytes <= _MOST_BYTES:
            yield value


# A larger tensor is probably a dataset, and a copy of it may not fit into memory.
_MOST_BYTES = 2**28


def remember_values(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return a function that restores the present values of some tensors, if they have changed."""
    before = [(it, it.detach().clone()) for it in tensors if it.device.type != "meta"]

    def restore() -> None:
        with torch.no_grad():
            for it, value in before:
                # An expanded tensor cannot be written to.
                if it.shape == value.shape and not torch.equal(it, value):
                    it.copy_(value)

    return restore


def attribute_spaces(owners: Iterable[Any], modules: Iterable[nn.Module] = ()) -> list[Space]:
    """Return the names and attributes of some objects, and of modules that they hold, such as metrics.

    Args:
        owners: The objects.
        modules: Modules that are left out.
    """
    spaces, known = [], set(ids(modules))
    for owner in owners:
        spaces.append((type(owner).__name__, vars(owner)))
        held = pytree.tree_leaves([it for it in vars(owner).values() if isinstance(it, (nn.Module, dict, list, tuple))])
        for module in (inner for it in held if isinstance(it, nn.Module) for inner in it.modules()):
            if id(module) not in known:
                known.add(id(module))
                spaces.append((type(module).__name__, vars(module)))
    return spaces


def _generator_states() -> tuple[Any, ...]:
    """Return the state of the generators whose numbers a trace would treat as constants."""
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"]


def _content(value: Any) -> Any:
    """Return a copy of a container, which its owner could change; None for all else."""
    return value.copy() if isinstance(value, (list, dict, set, deque)) else None


def _has_changed(container: Any, before: Any) -> bool:
    """Return whether a container has more or fewer entries than before, or another tensor as an entry."""
    if len(container) != len(before):
        return True
    if isinstance(container, dict):
        return any(isinstance(it, Tensor) and it is not before.get(name) for name, it in container.items())
    # The order of a set may change, and its entries are hashed by identity.
    if isinstance(container, set):
        return False
    return any(isinstance(it, Tensor) and it is not old for it, old in zip(container, before, strict=True))


def _undo_changes(space: MutableMapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Undo changes of numbers, tensors and containers, and return the names of changed attributes."""
    changed = []
    for name, value in list(space.items()):
        earlier, content = old.get(name, (None, None))
        if value is earlier and content is not None and _has_changed(value, content):
            value.clear()
            value.update(content) if isinstance(value, (dict, set)) else value.extend(content)
        elif (
            value is earlier
            or not isinstance(value, (Tensor, int, float, str, list, dict, tuple))
            or (isinstance(value, (int, float, str)) and value == earlier)
        ):
            continue
        elif name in old:
            space[name] = earlier
        else:
            del space[name]
        changed.append(name)
    return changed


def ids(things: Iterable[Any]) -> list[int]:
    """Return the ids of objects, for comparison."""
    return [id(it) for it in things]


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error, as a part of a sentence."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
