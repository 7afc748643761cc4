"""Effects of the code of a user on its trace: variables that it changes, and caches that it fills in its first call."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dovetail.trainers.whole_step.comparing import remember_randomness
from dovetail.trainers.whole_step.limits import (
    CannotCompileError,
    Space,
    TraceError,
    attribute_spaces,
    first_line,
    held_tensors,
    remember_values,
)
from dovetail.trainers.whole_step.tracing import with_tensors


def compute_only(compute: Callable[[Any], Any], root: nn.Module, batch: Any, leaves: Sequence[Tensor]) -> Any:
    """Return the outputs of a step for a batch, without a change of its tensors and of the buffers of its modules."""
    batch = with_tensors(batch, iter([it.clone() for it in leaves]))
    copies = {name: value.clone() for name, value in root.named_buffers()}
    if not copies:
        return compute(batch)
    with _reparametrize_module(root, copies, tie_weights=True):
        return compute(batch)


def fill_caches(
    compute: Callable[[Any], Any], root: nn.Module, batch: Any, leaves: Sequence[Tensor], spaces: Sequence[Space]
) -> Any:
    """Return the outputs of an eager step before its trace, without using random numbers or changing tensors.

    Code of the user may create tensors in its first call and keep them, such as the tables of a rotary embedding. If
    the trace made this call, they would be tensors without data, and every later step would fail.

    Args:
        compute: The step.
        root: Its modules.
        batch: The batch.
        leaves: The tensors of the batch.
        spaces: Names and attributes of objects whose tensors the step may change in place.

    Raises:
        CannotCompileError: The step draws from a `torch.Generator`, which would draw twice, or calls `backward`.
        TraceError: The step raises an error.
    """
    parameters = [*root.parameters()]
    restore_randomness = remember_randomness([*parameters, *leaves])
    restore_values = remember_values([*parameters, *held_tensors(spaces)])
    gradients, numbers = [it.grad for it in parameters], (random.getstate(), np.random.get_state())
    for parameter in parameters:
        parameter.grad = None
    try:
        with _RejectGenerators():
            outputs = compute_only(compute, root, batch, leaves)
        if any(it.grad is not None for it in parameters):
            raise CannotCompileError("the step adds gradients by itself, by backward")
    except CannotCompileError:
        raise
    except Exception as error:
        # The eager step that follows raises it again.
        raise TraceError(f"the step cannot be traced ({first_line(error)})") from error
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        restore_values()
        restore_randomness()
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
    if not isinstance(outputs, Mapping):
        return outputs
    # Detached, so that the activations of the step are freed before the compiler starts.
    return {name: it.detach() if isinstance(it, Tensor) else it for name, it in outputs.items()}


class _RejectGenerators(TorchFunctionMode):
    """Raises before a step draws from a generator of the user, which a graph cannot contain."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(it, torch.Generator) for it in pytree.tree_leaves((args, kwargs))):
            raise CannotCompileError("the step uses a Generator, which is not an input of a graph")
        return func(*args, **(kwargs or {}))


def variable_spaces(functions: Iterable[Any], modules: Iterable[nn.Module]) -> list[Space]:
    """Return the variables outside of functions of the user that they read by name, and attributes of their objects.

    A step may append to a list or update a metric that is not an attribute of the trainer.

    Args:
        functions: Functions and methods; others are skipped.
        modules: Modules; the methods `forward` of all that they contain are added to the functions.
    """
    found, objects = {}, []
    for function in (*functions, *(type(it).forward for module in modules for it in module.modules())):
        function = getattr(function, "__func__", function)
        if type(function) is FunctionType and _is_of_user(function.__globals__.get("__name__")):
            found[function] = variables = _Variables(function)
            objects += [it for it in variables.values() if hasattr(it, "__dict__") and _is_of_user(type(it).__module__)]
    owners = {id(it): it for it in objects if not isinstance(it, (type, FunctionType))}
    return [*((function.__name__, it) for function, it in found.items()), *attribute_spaces(owners.values())]


class _Variables(MutableMapping[str, Any]):
    """The variables of a function's closure, and those of its module whose names it contains."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._globals = function.__globals__
        self._names = [*self._cells, *sorted(_names(function.__code__) - set(self._cells))]

    def __getitem__(self, name: str) -> Any:
        if name not in self._cells:
            return self._globals[name]
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        else:
            self._globals[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._cells:
            del self._cells[name].cell_contents
        else:
            del self._globals[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function, also in the functions inside of it."""
    inner = (_names(it) for it in code.co_consts if isinstance(it, CodeType))
    return set(code.co_names).union(*inner)


def _is_of_user(module: Any) -> bool:
    top = str(module).partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("torch", "numpy", "dovetail")
