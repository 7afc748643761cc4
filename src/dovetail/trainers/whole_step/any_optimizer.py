"""Update rule for any optimizer of torch: its own `step`, traced with its numbers as tensors."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dovetail.accelerators import widest_float

Group = Mapping[str, Any]


def fitting(number: Tensor, other: Tensor) -> Tensor:
    """Return a number in the widest type that the device of another tensor has, for an operation with both.

    The result of two numbers is in the wider type of both, and some devices have no float64.
    """
    return number.to(widest_float(other.device.type))


def has_own_rule(kind: type[Optimizer]) -> bool:
    """Return whether a class is one of torch's optimizers that create their state before they update a group."""
    # A class of another library may keep its state in attributes that a graph would not change.
    return f"{kind.__module__}.".startswith("torch.optim.") and hasattr(kind, "_init_group")


def initial_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state that the first step of an optimizer would create for a parameter, and store nothing.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> sorted(initial_state(torch.optim.RMSprop([weight]), weight))
        ['square_avg', 'step']
    """
    group = next(group for group in optimizer.param_groups if any(it is parameter for it in group["params"]))
    scratch = _shallow(optimizer, {**group, "params": [parameter]}, {})
    initialize: Any = scratch._init_group  # type: ignore[attr-defined]
    gradient, parameter.grad = parameter.grad, torch.zeros_like(parameter)
    try:
        # Its other arguments are lists for the values that an update needs.
        initialize(scratch.param_groups[0], *([] for _ in list(signature(initialize).parameters)[1:]))
    finally:
        parameter.grad = gradient
    return {name: value for name, value in scratch.state[parameter].items() if isinstance(value, Tensor)}


class TracedRule:
    """Rule of an optimizer without a handwritten one: its own update of single tensors is traced.

    The numbers that schedules change are tensors in the trace. Every other setting is a constant of the graph, and so
    is the sign of each number, because an update compares its numbers with zero only.

    Args:
        optimizer: An optimizer of torch for which `has_own_rule` is true.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind = type(optimizer)
        group = optimizer.param_groups[0]
        self._scheduled = [name for name in _SCHEDULED if isinstance(group.get(name), (int, float, tuple, list))]
        skipped = {"params", "param_names", "lr", "initial_lr", *_FORMS}
        # Settings of the class: schedulers add theirs to the groups.
        self.settings = tuple(name for name in optimizer.defaults if name not in skipped)
        self._constants = [name for name in self.settings if name not in self._scheduled]

    def terms(self, group: Group) -> tuple[Any, ...]:
        """Return the constants of the update and the signs of its numbers."""
        signs = tuple((number > 0) - (number < 0) for number in self.numbers(group)[1:])
        return (*(group[name] for name in self._constants), signs)

    def numbers(self, group: Group) -> tuple[float, ...]:
        """Return the numbers that a schedule may change: the rate first."""
        values = (group[name] for name in self._scheduled)
        flat = chain.from_iterable(value if isinstance(value, (tuple, list)) else (value,) for value in values)
        return (float(group["lr"]), *map(float, flat))

    def slots(self, optimizer: Optimizer, parameter: nn.Parameter, terms: tuple[Any, ...]) -> tuple[str, ...]:
        """Return the names of a parameter's state."""
        return tuple(optimizer.state.get(parameter) or initial_state(optimizer, parameter))

    def weighted(self, loss: Tensor, outputs: Mapping[str, Any], numbers: Sequence[Tensor], terms: Any) -> Tensor:
        """Return the loss unchanged."""
        return loss

    def update(
        self,
        optimizer: Optimizer,
        group: Group,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[Tensor],
        terms: Any,
    ) -> None:
        """Trace the update of one parameter group, which changes parameters and states in place."""
        values = dict(zip(map(id, numbers), self.numbers(group), strict=True))
        rest = iter(numbers)
        given: dict[str, Any] = {"lr": next(rest)}
        for name in self._scheduled:
            value = group[name]
            given[name] = tuple(next(rest) for _ in value) if isinstance(value, (tuple, list)) else next(rest)
        forms = {name: form for name, form in _FORMS.items() if name in group}
        # Steps and similar numbers in double precision, as Python computes with them outside of a graph.
        wide = [
            {slot: fitting(it, it) if _is_number(slot, it, parameter) else it for slot, it in state.items()}
            for parameter, state in zip(parameters, states, strict=True)
        ]
        traced = _shallow(
            optimizer, {**group, **given, **forms, "params": [*parameters]}, dict(zip(parameters, wide, strict=True))
        )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        step: Any = self._kind.step
        try:
            with _NumbersAsTensors(values), _compiling():
                # Without torch's wrapper, which would put the names of a profiler into the graph.
                getattr(step, "__wrapped__", step)(traced)
        finally:
            for parameter in parameters:
                parameter.grad = None
        for parameter, state in zip(parameters, states, strict=True):
            for slot, value in state.items():
                if traced.state[parameter][slot] is not value:
                    value.copy_(traced.state[parameter][slot])


# Settings that schedules change, besides the rate.
_SCHEDULED = ("momentum", "betas", "weight_decay")
# The form of an update that compares no tensors with numbers.
_FORMS = {"foreach": False, "fused": False, "capturable": True, "differentiable": False}


def _is_number(slot: str, value: Tensor, parameter: Tensor) -> bool:
    return value.ndim == 0 and value.is_floating_point() and (slot == "step" or parameter.ndim > 0)


def _shallow(optimizer: Optimizer, group: dict[str, Any], state: Mapping[Any, Any]) -> Optimizer:
    """Return an optimizer of the same class and settings with one other group, and another state."""
    new = object.__new__(type(optimizer))
    vars(new).update(vars(optimizer), param_groups=[group], state=defaultdict(dict, state))
    return new


@contextmanager
def _compiling() -> Iterator[None]:
    """Let torch's optimizers choose their code for compilers, which does not read tensors."""
    compiler: Any = torch.compiler
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


class _NumbersAsTensors(TorchFunctionMode):
    """Allows tensors in place of Python's numbers: as factors of an operation, and in comparisons with zero.

    Args:
        values: The value of each tensor that stands for a number, by the id of the tensor.
    """

    def __init__(self, values: Mapping[int, float]) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _COMPARISONS and id(args[0]) in self._values and all(map(_is_zero, args[1:])):
            # Equal for all values of this sign, and the sign is a constant of the graph.
            return _COMPARISONS[name](self._values[id(args[0])], *args[1:])
        args, kwargs = self._fitting(args, kwargs)
        if name in ("lerp", "lerp_") and len(args) == 3 and isinstance(args[2], Tensor):
            return func(args[0], args[1], args[2].to(args[0].dtype))
        factor = kwargs.get("alpha", kwargs.get("value"))
        if isinstance(factor, Tensor) and name in _FACTORED:
            term = args[1] if len(args) == 2 else _FACTORED[name](*args[1:])
            # For a parameter without dimensions, the product has the type of the factor.
            added = (term * factor).to(args[0].dtype)
            return args[0].add_(added) if name.endswith("_") else args[0].add(added)
        return func(*args, **kwargs)

    def _fitting(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments without float64 if one of them is on a device that has none."""
        tensors = [it for it in (*args, *kwargs.values()) if isinstance(it, Tensor)]
        limited = next((it for it in tensors if widest_float(it.device.type) is not torch.float64), None)
        if limited is None:
            return args, kwargs

        def fit(it: Any) -> Any:
            return fitting(it, limited) if isinstance(it, Tensor) and it.dtype is torch.float64 else it

        return tuple(map(fit, args)), {name: fit(it) for name, it in kwargs.items()}


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


_COMPARISONS: dict[str, Callable[..., Any]] = {
    "__bool__": bool,
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
_FACTORED: dict[str, Callable[..., Any]] = {
    "add": operator.pos,
    "add_": operator.pos,
    "addcmul": operator.mul,
    "addcmul_": operator.mul,
    "addcdiv": operator.truediv,
    "addcdiv_": operator.truediv,
}
