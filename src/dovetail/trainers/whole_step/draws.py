"""Draws of random numbers as plain values, so that compiled code on disk can make them in the order of its trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def describe_draws(draws: Sequence[Callable[[], Tensor]]) -> list[Any] | None:
    """Return values for a JSON file from which `build_draw` makes the same draws; None if there are none.

    Args:
        draws: Partial calls of operations of torch.
    """
    found = []
    try:
        for draw in draws:
            assert isinstance(draw, partial)
            operation: Any = draw.func
            if operation.namespace != "aten":
                return None
            name, _, overload = operation.__name__.partition(".")
            found.append([name, overload, _plain(draw.args), [[key, _plain(it)] for key, it in draw.keywords.items()]])
    except TypeError:
        return None
    return found


def build_draw(described: Sequence[Any]) -> Callable[[], Tensor]:
    """Return a function that draws the random numbers of one operation.

    Raises:
        ValueError: The operation draws no random numbers.
    """
    name, overload, args, kwargs = described
    operation = getattr(getattr(torch.ops.aten, name), overload)
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        raise ValueError(f"{name} draws no random numbers")
    return partial(operation, *map(_value, args), **{str(key): _value(it) for key, it in kwargs})


def _plain(value: Any) -> Any:
    """Return an argument as a value of a JSON file; raise `TypeError` if that is not possible."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if type(value) in (int, float, bool, str, type(None)):
        return value
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, Tensor) and value.device.type == "cpu":
        # Only its form counts.
        return {"like": [[*value.shape], [*value.stride()], _plain(value.dtype)]}
    raise TypeError(f"{type(value).__name__} is not stored")


def _value(plain: Any) -> Any:
    """Return the argument that `_plain` has described."""
    if isinstance(plain, list):
        return [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "like":
        shape, stride, dtype = content
        return torch.empty_strided(shape, stride, dtype=_value(dtype))
    if kind == "device":
        return torch.device(content)
    value = getattr(torch, content)
    if kind != "torch" or not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"{content} is no argument of a draw")
    return value
