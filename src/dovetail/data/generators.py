"""Random generators inside of datasets, samplers and transforms: find them, and read and restore their states."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import CheckpointError

Source: TypeAlias = "torch.Generator | np.random.Generator | np.random.RandomState | random.Random"

_SOURCES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# The search stops after this number of objects: a dataset with a million objects must not delay every epoch.
_MOST_OBJECTS = 5_000
# Longer lists and dictionaries contain file names or labels, not transforms.
_MOST_ITEMS = 100
_LEAVES = (str, bytes, int, float, complex, Tensor, np.ndarray, np.generic, type, types.ModuleType, torch.dtype)


def find_generators(**roots: Any) -> dict[str, Source]:
    """Return the generators that objects contain, by the path of attributes to each.

    The global generators of Python, NumPy and torch are left out. The search includes attributes, short lists and
    dictionaries, `functools.partial`, bound methods and closures.

    Args:
        roots: The objects to search, by the first part of their paths. None is skipped.

    Example:
        >>> class Dataset:
        ...     def __init__(self):
        ...         self.transforms = [np.random.default_rng(0)]
        >>> list(find_generators(dataset=Dataset()))
        ['dataset.transforms.0']
    """
    found: dict[str, Source] = {}
    waiting = deque(roots.items())
    # Keep the objects and not only their ids: the id of a freed object may be reused.
    seen: dict[int, Any] = {id(each): each for each in _global_sources()}
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value = waiting.popleft()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, random.SystemRandom):
            # The randomness of the operating system has no state.
            continue
        if isinstance(value, _SOURCES):
            found[path] = value
        else:
            waiting.extend((f"{path}.{name}", part) for name, part in _parts(value))
    return found


def generator_states(found: Mapping[str, Source]) -> dict[str, Any]:
    """Return the states of generators, by the same paths, in a form that checkpoints and pipes accept."""
    return {path: _state(source) for path, source in found.items()}


def set_generator_states(found: Mapping[str, Source], states: Mapping[str, Any]) -> list[str]:
    """Restore the states returned by `generator_states`, and return the paths that no longer have a generator.

    Raises:
        CheckpointError: A state does not belong to the type of generator at its path.
    """
    for path, state in states.items():
        if path in found:
            _restore(found[path], state, path)
    return [path for path in states if path not in found]


def global_states() -> dict[str, Any]:
    """Return the states of the global generators of this process, in the form of `generator_states`."""
    return {name: _state(source) for name, source in zip(_GLOBAL, _global_sources(), strict=True)}


def set_global_states(states: Mapping[str, Any]) -> None:
    """Restore the states returned by `global_states`."""
    for name, source in zip(_GLOBAL, _global_sources(), strict=True):
        if name in states:
            _restore(source, states[name], name)


_GLOBAL = ("python", "numpy", "torch")


def _global_sources() -> tuple[Source, ...]:
    # Python and NumPy have no public name for their global generators, but a bound method refers to them.
    return (
        random.random.__self__,  # type: ignore[attr-defined]  # mypy takes a bound method for a function
        np.random.get_state.__self__,  # type: ignore[attr-defined]  # mypy takes a bound method for a function
        torch.default_generator,
    )


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the objects inside of `value`, with their names."""
    if isinstance(value, (list, tuple)):
        if len(value) <= _MOST_ITEMS:
            yield from enumerate(value)
    elif isinstance(value, dict):
        if len(value) <= _MOST_ITEMS:
            yield from value.items()
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:
                # The cell has no value yet.
                continue
    else:
        for kind in type(value).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if hasattr(value, name):
                    yield name, getattr(value, name)
        yield from list(getattr(value, "__dict__", {}).items())


def _state(source: Source) -> Any:
    """Return the state of a generator as plain values."""
    if isinstance(source, torch.Generator):
        # Bytes, because a tensor in a queue between processes costs a block of shared memory.
        return source.get_state().numpy().tobytes()
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, np.random.RandomState):
        return _plain(source.get_state(legacy=False))
    return _plain(source.bit_generator.state)


def _restore(source: Source, state: Any, path: str) -> None:
    """Set the state of a generator; raise with its path if the state belongs to another kind."""
    try:
        if isinstance(source, torch.Generator):
            source.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif isinstance(source, random.Random):
            source.setstate(state)
        elif isinstance(source, np.random.RandomState):
            source.set_state(_arrays(state))
        else:
            source.bit_generator.state = _arrays(state)
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the random state of {path} is not one of a {type(source).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """Replace arrays by their type and bytes, which compare with `==` and need no shared memory."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tobytes())
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    """Return the value that was given to `_plain`."""
    if isinstance(value, Mapping):
        return {name: _arrays(part) for name, part in value.items()}
    if isinstance(value, tuple):
        kind, content = value
        return np.frombuffer(content, dtype=np.dtype(kind)).copy()
    return value
