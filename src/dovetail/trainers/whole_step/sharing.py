"""Compiled code that trainers of one process share if their steps are the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

# The number of graphs that a process keeps; those that were used last are kept.
_MOST_SHARED = 32


@dataclass(frozen=True)
class Code:
    """A compiled graph without the tensors of a trainer.

    Attributes:
        call: Takes all inputs and returns the outputs.
        is_used: For each input of the trace, True if the graph takes it.
        draws: Functions that draw the random numbers of a call.
        names: The names of the outputs of a step.
        fixed: Outputs that are not tensors.
        sizes: The numbers of samples that the graph supports, if it supports several.
        library: The file of the compiled code, if it has one.
        plain: Like `call`, but calls the operations of the graph one by one; None if it is not needed or unknown.
        constants: Tensors that were found in neither modules nor batch; code with such tensors is not shared.
    """

    call: Callable[..., Any]
    is_used: tuple[bool, ...]
    draws: tuple[Callable[[], Tensor], ...] = ()
    names: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()
    sizes: frozenset[int] = frozenset()
    constants: tuple[Tensor, ...] = ()
    library: Path | None = None
    plain: Callable[..., Any] | None = None


def find_shared(key: Any) -> Code | None:
    """Return the code that this process has for a key; None if there is none.

    Args:
        key: Nested values, types and functions that describe all inputs of a trace; None means unknown inputs.

    Example:
        >>> code = Code(print, (True,))
        >>> share(("step", [1, 2.0]), code)
        >>> find_shared(("step", [1, 2.0])) is code, find_shared(("step", [1, 2]))
        (True, None)
    """
    name = None if key is None else _frozen(key)
    if name is None or name not in _SHARED:
        return None
    _SHARED.move_to_end(name)
    return _SHARED[name]


def share(key: Any, code: Code) -> None:
    """Keep code for other trainers of this process; code with tensors of one trainer is not kept."""
    if key is not None and not code.constants:
        _SHARED[_frozen(key)] = code
        while len(_SHARED) > _MOST_SHARED:
            _SHARED.popitem(last=False)


_SHARED: OrderedDict[Hashable, Code] = OrderedDict()


def _frozen(value: Any) -> Hashable:
    """Return nested lists, tuples and dictionaries as tuples, with the types of numbers: 1, 1.0 and True are equal."""
    if isinstance(value, (list, tuple)):
        return type(value), *map(_frozen, value)
    if isinstance(value, dict):
        return dict, *((name, _frozen(each)) for name, each in value.items())
    return type(value), value
