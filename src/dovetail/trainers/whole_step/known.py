"""Non-tensor inputs of modules and strategies whose code is known, to detect a step that has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

# Torch's own layers and losses: their attributes determine what they compute.
_LAYERS = "torch.nn.modules."


class UnknownError(Exception):
    """An object has code of unknown behavior, so it may read anything."""


def read_by(
    piece: Any, known: frozenset[type[Any]], *, trusts_code: bool = False, within: frozenset[int] = frozenset()
) -> Any:
    """Return the inputs of a computation besides tensors, for a comparison with an earlier result.

    Args:
        piece: A module, a value, a container, an object of a known type, or a partial call of its method.
        known: Types of objects whose methods read only their arguments and the object's attributes.
        trusts_code: True to also accept modules of users, instances of dataclasses, and functions without a closure.
            Their code may read other values, such as globals, so the result is valid only if a loss is compared before
            it is used.
        within: The ids of the objects that contain this one.

    Raises:
        UnknownError: The object may read values that are not inputs of a graph else.

    Example:
        >>> layer, before = nn.Dropout(0.1), read_by(nn.Dropout(0.1), frozenset())
        >>> read_by(layer, frozenset()) == before
        True
        >>> layer.p = 0.2
        >>> read_by(layer, frozenset()) == before
        False
    """
    kind = type(piece)
    if kind in _VALUES or (trusts_code and (kind in _MORE_VALUES or (kind is FunctionType and not piece.__closure__))):
        # With its type: 1 and True are equal in Python.
        return kind, piece
    if isinstance(piece, Tensor):
        # The content of a tensor is an input of the graph.
        return kind, piece.shape, piece.dtype
    if id(piece) in within:
        raise UnknownError(f"an object of type {kind.__name__} contains itself")
    read = partial(read_by, known=known, trusts_code=trusts_code, within=within | {id(piece)})
    if kind is list or kind is tuple:
        return kind, [read(each) for each in piece]
    if isinstance(piece, Mapping):
        # A dictionary of the user may have methods and attributes, too. Some have their entries as attributes.
        own = getattr(piece, "__dict__", piece) if trusts_code else piece
        return kind, [(name, read(each)) for name, each in piece.items()], None if own is piece else read(own)
    if isinstance(piece, nn.Module):
        return kind, _read_by_module(piece, read, trusts_code=trusts_code)
    if kind in known or (trusts_code and kind is SimpleNamespace):
        return kind, read(vars(piece))
    if trusts_code and is_dataclass(kind):
        # One with slots has no dictionary.
        own = {it.name: getattr(piece, it.name) for it in fields(kind) if hasattr(piece, it.name)}
        return kind, read({**getattr(piece, "__dict__", {}), **own})
    if kind is partial and type(owner := getattr(piece.func, "__self__", None)) in known:
        return piece.func.__func__, read(owner)
    raise UnknownError(f"{kind.__name__} may read values that are not inputs of a graph")


_VALUES = frozenset({int, float, bool, str, bytes, type(None)})


_MORE_VALUES = frozenset({BuiltinFunctionType, torch.dtype, torch.device, torch.Size, type})
# The attributes of every module: hooks, which prevent a graph, and parameters and buffers, which are its inputs.
_TORCHS = frozenset(vars(nn.Module())) - {"training"}


def _read_by_module(module: nn.Module, read: Callable[[Any], Any], *, trusts_code: bool) -> Any:
    """Return the attributes and submodules of a layer; raise for code of users, unless it is trusted."""
    attributes = vars(module)
    is_known = type(module).__module__.startswith(_LAYERS) or trusts_code
    if not is_known or "forward" in attributes:
        raise UnknownError(f"{type(module).__name__} may read values that are not inputs of a graph")
    skipped = _TORCHS if trusts_code else {name for name in attributes if name[0] == "_"}
    own = {name: value for name, value in attributes.items() if name not in skipped}
    missing = [name for name, buffer in module._buffers.items() if buffer is None]
    return read(own), missing, read(module._modules)
