"""Non-tensor inputs of modules and strategies whose code is known, to detect a step that has changed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

# Torch's own layers and losses: their attributes determine what they compute.
_LAYERS = "torch.nn.modules."


class UnknownError(Exception):
    """An object has code of unknown behavior, so it may read anything."""


def read_by(piece: Any, known: frozenset[type[Any]]) -> Any:
    """Return the inputs of a computation besides tensors, for a comparison with an earlier result.

    Args:
        piece: A module, a value, a container, an object of a known type, or a partial call of its method.
        known: Types of objects whose methods read only their arguments and the object's attributes.

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
    if kind in _VALUES:
        # With its type: 1 and True are equal in Python.
        return kind, piece
    if isinstance(piece, Tensor):
        # The content of a tensor is an input of the graph.
        return kind, piece.shape, piece.dtype
    if kind is list or kind is tuple:
        return kind, [read_by(each, known) for each in piece]
    if isinstance(piece, Mapping):
        return [(name, read_by(each, known)) for name, each in piece.items()]
    if isinstance(piece, nn.Module):
        return kind, _read_by_module(piece, known)
    if kind in known:
        return kind, read_by(vars(piece), known)
    if kind is partial and type(owner := getattr(piece.func, "__self__", None)) in known:
        return piece.func.__func__, read_by(owner, known)
    raise UnknownError(f"{kind.__name__} may read values that are not inputs of a graph")


_VALUES = frozenset({int, float, bool, str, bytes, type(None)})


def _read_by_module(module: nn.Module, known: frozenset[type[Any]]) -> Any:
    """Return the attributes and submodules of a layer of torch; raise for other modules."""
    attributes = vars(module)
    if not type(module).__module__.startswith(_LAYERS) or "forward" in attributes:
        raise UnknownError(f"{type(module).__name__} may read values that are not inputs of a graph")
    # The others are torch's: hooks, which prevent a graph, and the parameters, which are inputs of the graph.
    own = {name: value for name, value in attributes.items() if name[0] != "_"}
    missing = [name for name, buffer in module._buffers.items() if buffer is None]
    return read_by(own, known), missing, read_by(module._modules, known)
