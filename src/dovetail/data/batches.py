"""Operations on batches of any structure: move, count, slice, split into inputs and targets, and join.

A *structure* is a tuple, a named tuple, a list, a mapping or a dataclass instance, nested to any depth. Everything
else is a *leaf*: tensors and arrays, objects with a method `to`, such as graphs, and strings, numbers and `None`, which
are left unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dovetail.accelerators import can_pin, send
from dovetail.errors import DataError

# In order of precedence.
TARGET_KEYS = ("labels", "label", "target", "targets", "y")


def to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return `batch` with every tensor on `device`; the same object if all tensors are there already.

    Args:
        batch: A tensor, an object with a method `to` (see `move_object`), or a structure that contains some. Other
            leaves are left unchanged.
        device: The target device.
        non_blocking: True to copy without waiting for the device, through pinned memory.

    Example:
        >>> batch = (torch.zeros(2), {"name": ["a", "b"], "mask": None})
        >>> to_device(batch, torch.device("cpu")) is batch
        True
    """
    if isinstance(batch, Tensor):
        if batch.device == device:
            return batch
        return send(batch, device) if non_blocking else batch.to(device)
    # Nearly every batch is a flat pair of tensors. Checking this here, without another call, keeps the cost per
    # batch below a microsecond.
    if type(batch) is list or type(batch) is tuple:
        for item in batch:
            if not isinstance(item, Tensor) or item.device != device:
                break
        else:
            return batch
    parts = _parts(batch)
    if not parts:
        # Loaders create objects on the CPU. Some classes have a method `to` with another meaning, such as dates.
        is_there = torch.device(device).type == "cpu" and not isinstance(batch, PackedSequence)
        return batch if is_there else move_object(batch, device, non_blocking)
    moved = [to_device(part, device, non_blocking) for part in parts]
    if all(new is old for new, old in zip(moved, parts, strict=True)):
        return batch
    return _with_parts(batch, moved)


def move_object(leaf: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return an object on a device by its own method `to`, such as a graph; other leaves unchanged.

    Args:
        leaf: Any leaf except a tensor.
        device: The target device.
        non_blocking: True to copy without waiting for the device: from pinned memory, if the class has `pin_memory`.
    """
    takes_non_blocking = _move_of(leaf.__class__)
    if takes_non_blocking is None:
        return leaf
    if not non_blocking or not can_pin(device.type):
        moved = leaf.to(device)
    else:
        if callable(getattr(leaf.__class__, "pin_memory", None)):
            # An object that is on the device already cannot be pinned.
            with suppress(RuntimeError):
                leaf = leaf.pin_memory()
        moved = leaf.to(device, non_blocking=True) if takes_non_blocking else leaf.to(device)
    # Some classes move their tensors in place and return nothing.
    return leaf if moved is None else moved


def moves_itself(leaf: Any) -> bool:
    """Return whether `move_object` moves a leaf by its own method `to`.

    Example:
        >>> moves_itself(torch.nn.utils.rnn.pack_sequence([torch.ones(2)])), moves_itself("text")
        (True, False)
    """
    return _move_of(leaf.__class__) is not None


@lru_cache(maxsize=256)
def _move_of(kind: type) -> bool | None:
    """Return whether the method `to` of a class takes `non_blocking`; None if its objects cannot be moved.

    A module has such a method, but moves itself in place, and would stay on the device after the batch.
    """
    move = getattr(kind, "to", None)
    if not callable(move) or issubclass(kind, (Tensor, np.ndarray, nn.Module)):
        return None
    with suppress(ValueError):
        parameters = inspect.signature(move).parameters.values()
        return any(it.name == "non_blocking" or it.kind is it.VAR_KEYWORD for it in parameters)
    return False


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return `batch` with `function` applied to every tensor; the same object if no tensor changed.

    Example:
        >>> map_tensors(torch.neg, {"x": torch.ones(2), "name": "a"})
        {'x': tensor([-1., -1.]), 'name': 'a'}
    """
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return `batch` with `function` applied to every leaf.

    The same object is returned if no leaf changed. A packed sequence is one leaf.

    Example:
        >>> map_leaves(lambda leaf: leaf * 2, {"x": [1, 2], "name": "a"})
        {'x': [2, 4], 'name': 'aa'}
    """
    parts = _parts(batch)
    if not parts:
        return function(batch)
    mapped = [map_leaves(function, part) for part in parts]
    if all(new is old for new, old in zip(mapped, parts, strict=True)):
        return batch
    return _with_parts(batch, mapped)


def batch_length(batch: Any) -> int:
    """Return the number of samples in `batch`.

    This is the first size of the first tensor or array, depth first. If there is none, it is the number of items of the
    first flat list or tuple, such as a list of strings.

    Raises:
        DataError: Nothing in the batch has a length.

    Example:
        >>> batch_length({"scale": torch.tensor(2.0), "image": torch.zeros(8, 3), "label": torch.zeros(8)})
        8
        >>> batch_length((["a", "b"], None))
        2
    """
    # The usual batch, a flat list or tuple of tensors, needs no search.
    first = batch[0] if (type(batch) is list or type(batch) is tuple) and batch else batch
    if isinstance(first, Tensor) and first.ndim:
        return first.size(0)
    for length in _array_lengths(batch):
        return length
    for length in _list_lengths(batch):
        return length
    raise DataError(
        f"cannot find the number of samples in a batch of type {type(batch).__name__}: expected a tensor or "
        "an array with at least one dimension, or a list, somewhere in it"
    )


def slice_batch(batch: Any, start: int, stop: int, length: int | None = None) -> Any:
    """Return the samples from `start` to `stop` (exclusive) of `batch`, in the same structure.

    Tensors and arrays with one row per sample are sliced. Lists and tuples with one item per sample are sliced if their
    items cannot be, such as a list of strings. Other values, such as a number or None, are the same in every slice.

    Args:
        batch: A tensor, an array, or a structure that contains some.
        start: The first sample.
        stop: The sample after the last one.
        length: The number of samples in `batch`; None means `batch_length(batch)`.

    Raises:
        DataError: No part of the batch has one row or item per sample, or it is a packed sequence.

    Example:
        >>> slice_batch({"x": torch.arange(4), "name": ["a", "b", "c", "d"], "scale": 2.0}, 1, 3)
        {'x': tensor([1, 2]), 'name': ['b', 'c'], 'scale': 2.0}
    """
    length = batch_length(batch) if length is None else length
    cut = _cut(batch, start, stop, length)
    if cut is batch:
        raise DataError(
            f"cannot slice a batch of type {type(batch).__name__}: expected a tensor, an array or a list with one "
            f"entry for each of its {length} samples"
        )
    return cut


def split_batch(batch: Any, target: str | None = None) -> tuple[Any, Any]:
    """Return the inputs and the targets of `batch`; targets are `None` if it has none.

    A pair is inputs and targets. In a longer tuple or list the last item is the targets, and the inputs are the tuple
    of the other items. In a mapping the targets are under `target` or, if this is None, under "labels", "label",
    "target", "targets" or "y"; the inputs are the only other value, or the dictionary of the other values. Every other
    batch is inputs only.

    Example:
        >>> split_batch({"image": 1, "label": 2})
        (1, 2)
        >>> split_batch({"image": 1, "price": 2}, "price")
        (1, 2)
        >>> split_batch((1, 2, 3))
        ((1, 2), 3)
        >>> split_batch([1])
        (1, None)
    """
    if isinstance(batch, (list, tuple)) and batch and not isinstance(batch, PackedSequence):
        if len(batch) == 2:
            return batch[0], batch[1]
        if len(batch) == 1:
            return batch[0], None
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, Mapping):
        key = find_target(batch) if target is None else target
        if key in batch:
            rest = {name: value for name, value in batch.items() if name != key}
            return (next(iter(rest.values())) if len(rest) == 1 else rest), batch[key]
    return batch, None


def find_target(names: Container[Any]) -> str | None:
    """Return the first usual name of targets among the names of a batch or a table; `None` if it has none.

    Example:
        >>> find_target(["age", "label"])
        'label'
    """
    return next((key for key in TARGET_KEYS if key in names), None)


def concat(outputs: Sequence[Any]) -> Any:
    """Join the outputs of several batches into one with the same structure; `[]` if there are none.

    Tensors and arrays are concatenated along their first dimension, or stacked if they have no dimensions. If tensors
    differ in another dimension, such as the length of padded sequences, the result is a list with one tensor for each
    sample. Tuples, mappings and dataclasses are joined part by part. Lists have one item per sample and are
    concatenated. Other values, and mappings with different keys, are collected in a list.

    Example:
        >>> concat([(torch.tensor([1, 2]), ["a", "b"]), (torch.tensor([3]), ["c"])])
        (tensor([1, 2, 3]), ['a', 'b', 'c'])
        >>> concat([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}])
        {'loss': tensor([1., 2.])}
    """
    outputs = list(outputs)
    if not outputs:
        return []
    first = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        if any(output.ndim and output.shape[1:] != first.shape[1:] for output in outputs):
            return [row for output in outputs for row in output]
        return torch.cat(outputs) if first.ndim else torch.stack(outputs)
    if all(isinstance(output, np.ndarray) for output in outputs):
        return np.concatenate(outputs) if first.ndim else np.stack(outputs)
    if all(isinstance(output, list) for output in outputs):
        return [item for output in outputs for item in output]
    if isinstance(first, Mapping):
        if any(not isinstance(output, Mapping) or output.keys() != first.keys() for output in outputs):
            return outputs
        return _with_parts(first, [concat([output[key] for output in outputs]) for key in first])
    if _parts(first) and not isinstance(first, list) and all(type(output) is type(first) for output in outputs):
        columns = zip(*map(_parts, outputs), strict=True)
        return _with_parts(first, [_joined(column) for column in columns])
    return outputs


def with_class_of(example: Any, outputs: Any) -> Any:
    """Return a dictionary or a tuple in the class of an example with the same names; other outputs unchanged.

    A message between processes turns every mapping into a dictionary, and every named tuple into a tuple.

    Example:
        >>> from collections import UserDict
        >>> type(with_class_of(UserDict(a=1), {"a": 2}))
        <class 'collections.UserDict'>
    """
    if isinstance(example, _NamedTuple) and type(outputs) is tuple and len(example._fields) == len(outputs):
        return _with_parts(example, outputs)
    is_alike = isinstance(example, Mapping) and type(outputs) is dict and list(example) == list(outputs)
    return _with_parts(example, list(outputs.values())) if is_alike and type(example) is not dict else outputs


def class_name(outputs: Any) -> list[str]:
    """Return the module and the name of a class that a message would lose; empty for other outputs.

    Example:
        >>> class_name({"a": 1}), class_name((1, 2))
        ([], [])
    """
    kind = type(outputs)
    is_lost = isinstance(outputs, _NamedTuple) or (isinstance(outputs, dict) and dataclasses.is_dataclass(kind))
    return [kind.__module__, kind.__qualname__] if is_lost else []


def in_class(name: Sequence[str], outputs: Any) -> Any:
    """Return a tuple or a dictionary in a class by the result of `class_name`.

    The name is compared with those of the classes that exist in this process; no attribute is read by a name, and
    nothing is imported. The outputs are unchanged if there is no such class.
    """
    found: Any = None
    for kind in _kinds_of(type(outputs)) if name and type(outputs) in (tuple, dict) else ():
        if [kind.__module__, kind.__qualname__] == list(name):
            # A notebook may have defined the class several times: the last one counts.
            found = kind
    if found is None:
        return outputs
    if type(outputs) is tuple:
        return found._make(outputs) if hasattr(found, "_make") else outputs
    # The outputs of transformers.
    names = {field.name for field in dataclasses.fields(found) if field.init} if dataclasses.is_dataclass(found) else ()
    return found(**outputs) if names and outputs.keys() <= names else outputs


def _kinds_of(base: type[Any]) -> Iterator[type[Any]]:
    """Yield all classes of this process that derive from a class, in the order of their definition."""
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds_of(kind)


def _cut(batch: Any, start: int, stop: int, length: int) -> Any:
    """Return a slice of all parts with one entry per sample; the same object if there is none."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch[start:stop] if batch.ndim and batch.shape[0] == length else batch
    if isinstance(batch, PackedSequence):
        raise DataError("cannot slice a packed sequence: pack inside of the step, and give padded tensors and lengths")
    parts = _parts(batch)
    cut = [_cut(part, start, stop, length) for part in parts]
    if any(new is not old for new, old in zip(cut, parts, strict=True)):
        return _with_parts(batch, cut)
    if isinstance(batch, (list, tuple)) and len(batch) == length and not isinstance(batch, _NamedTuple):
        return type(batch)(batch[start:stop])
    return batch


def _joined(column: Sequence[Any]) -> Any:
    # If a model returns None for this part, return None and not a list of None.
    return None if all(item is None for item in column) else concat(column)


@runtime_checkable
class _NamedTuple(Protocol):
    """The attributes by which a named tuple differs from other tuples."""

    _fields: tuple[str, ...]

    def _make(self, parts: Sequence[Any]) -> Any: ...


def _parts(batch: Any) -> Sequence[Any]:
    """Return the parts of a structure; an empty sequence for a leaf."""
    if isinstance(batch, PackedSequence):
        return ()
    if isinstance(batch, (tuple, list)):
        return batch
    if isinstance(batch, Mapping):
        return list(batch.values())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Fields with `init=False` are computed by the class, and `dataclasses.replace` rejects them.
        return [getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init]
    return ()


def _with_parts(batch: Any, parts: Sequence[Any]) -> Any:
    """Return a structure like `batch` with other parts."""
    if isinstance(batch, Mapping):
        changed = dict(zip(batch, parts, strict=True))
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return changed
        if dataclasses.is_dataclass(type(batch)):
            # The outputs of transformers are both, and reject `update`.
            both: Any = batch
            return dataclasses.replace(both, **changed)
        # Mappings of other libraries have attributes besides their items, so copy the object.
        clone = copy.copy(batch)
        clone.update(changed)
        return clone
    if isinstance(batch, _NamedTuple):
        return batch._make(parts)
    if isinstance(batch, (tuple, list)):
        return type(batch)(parts)
    names = [field.name for field in dataclasses.fields(batch) if field.init]
    return dataclasses.replace(batch, **dict(zip(names, parts, strict=True)))


def _array_lengths(batch: Any) -> Iterator[int]:
    """Yield the first size of each tensor and array in a batch, depth first."""
    if isinstance(batch, (Tensor, np.ndarray)):
        if batch.ndim:
            yield int(batch.shape[0])
    elif isinstance(batch, PackedSequence):
        # The data of a packed sequence has one row per time step. The first step contains every sample.
        yield int(batch.batch_sizes[0])
    else:
        for part in _parts(batch):
            yield from _array_lengths(part)


def _list_lengths(batch: Any) -> Iterator[int]:
    """Yield the length of each flat list in a batch that holds neither arrays nor structures, depth first."""
    parts = _parts(batch)
    for part in parts:
        yield from _list_lengths(part)
    # A flat list of strings or numbers counts; the parts of other lists were searched above.
    structured = any(isinstance(part, (Tensor, np.ndarray)) or _parts(part) for part in parts)
    if isinstance(batch, (list, tuple)) and not structured and any(part is not None for part in parts):
        yield len(batch)
