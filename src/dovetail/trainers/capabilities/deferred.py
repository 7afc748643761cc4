"""Initialization of models that were built on the device `meta`, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError


def is_deferred(model: nn.Module) -> bool:
    """Return whether a parameter or a buffer of a model has no data yet."""
    return any(it.is_meta for it in (*model.parameters(), *model.buffers()))


def initialize(model: nn.Module, seed: int, finish: Callable[[nn.Module], None] = lambda module: None) -> None:
    """Give every module of a model its data, children before parents, with the random numbers of a seed.

    The values are those of `torch.manual_seed(seed)` and the constructor of the model, if its modules draw numbers only
    in `reset_parameters`, and if it creates them in the order in which it registers them.

    Args:
        model: The model.
        seed: The seed. The state of the random numbers is restored afterwards.
        finish: Called with each module after all data inside of it exist.

    Raises:
        ConfigError: A module has parameters or buffers, but no `reset_parameters`.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, module, is_new in _allocate_all(model, lambda it: it.is_meta):
            if is_new:
                _reset(name or type(model).__name__, module)
            finish(module)


def allocate(model: nn.Module, memory_format: str | None = None) -> dict[int, Tensor]:
    """Replace parameters and buffers that a trainer would move or convert by tensors without values on the CPU.

    Args:
        model: The model.
        memory_format: `channels_last`, or None for no change.

    Returns:
        The new tensors by the id of the old ones.
    """

    def is_missing(value: Tensor) -> bool:
        # Torch would also convert a kernel of one pixel, which has both formats.
        return value.device.type != "cpu" or (memory_format is not None and value.ndim == 4)

    before = [*model.parameters(), *model.buffers()]
    for _ in _allocate_all(model, is_missing):
        pass
    after = [*model.parameters(), *model.buffers()]
    return {id(old): new for old, new in zip(before, after, strict=True) if old is not new}


def _allocate_all(model: nn.Module, is_missing: Callable[[Tensor], bool]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Allocate the missing tensors of each module; yield its name, the module, and whether one of them is new."""
    uses = Counter(id(value) for _, module in _children_first(model) for _, value in _own(module))
    # Shared parameters stay shared. The others are not held here, so that a sharded block frees its whole tensors.
    shared: dict[int, Tensor] = {}
    kept: list[Tensor] = []
    for name, module in _children_first(model):
        missing = [(key, value) for key, value in _own(module) if is_missing(value)]
        is_new = any(id(value) not in shared for _, value in missing)
        for key, value in missing:
            filled = shared[id(value)] if id(value) in shared else _allocate(value)
            if uses[id(value)] > 1:
                shared[id(value)] = filled
                # Otherwise another tensor could have the same id.
                kept.append(value)
            owner: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
            owner[key] = filled
        yield name, module, is_new


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _allocate(value: Tensor) -> Tensor:
    empty = torch.empty_like(value, device="cpu")
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _reset(name: str, module: Any) -> None:
    # `nn.MultiheadAttention` has the other name.
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, method, None)):
            reset()
            return
    raise ConfigError(
        f"{name} was built on the device 'meta' and has no method reset_parameters, which would give its parameters "
        "and buffers their values; define it, or build the model on the CPU"
    )


def _children_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}".lstrip("."))
    yield path, module
