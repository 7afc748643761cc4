"""Weights at a client: loaded into a model, subtracted after training, and copied out of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.federated.messages import Weights

# The number of elements, of any type, that end at a boundary of torch's memory.
_ALIGNMENT = 64


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Copy weights into a model, in place.

    Raises:
        ConfigError: The model has no such entry, or one of another shape.
    """
    state = model.state_dict()
    try:
        targets = [state[name] for name in weights]
    except KeyError as error:
        raise ConfigError(f"weights: the model has no {error.args[0]!r}") from None
    for name, value in weights.items():
        if state[name].shape != value.shape:
            raise ConfigError(
                f"weights: {name!r} has shape {tuple(value.shape)}, the model's has {tuple(state[name].shape)}"
            )
    with torch.no_grad():
        # One call for all tensors: for a small model, one call per tensor would take longer than the copies.
        torch._foreach_copy_(targets, list(weights.values()))


def difference(after: Weights, before: Weights) -> dict[str, Tensor]:
    """Return the differences. Tensors of one type share one block of memory, so that they are sent together."""
    ends: dict[torch.dtype, int] = {}
    places = {}
    for name, value in after.items():
        dtype = torch.promote_types(value.dtype, before[name].dtype)
        start = ends.get(dtype, 0)
        places[name] = dtype, start, start + value.numel()
        # Aligned as torch aligns its own memory.
        ends[dtype] = start + -(-value.numel() // _ALIGNMENT) * _ALIGNMENT
    device = next(iter(after.values())).device if after else None
    memory = {dtype: torch.empty(end, dtype=dtype, device=device) for dtype, end in ends.items()}
    parts = {name: memory[dtype][start:end].view(after[name].shape) for name, (dtype, start, end) in places.items()}
    for name, part in parts.items():
        torch.sub(after[name], before[name], out=part)
    if device is None or device.type == "cpu":
        return parts
    # One transfer from the device per type, not one per tensor.
    sent = {dtype: whole.cpu() for dtype, whole in memory.items()}
    return {name: sent[dtype][start:end].view(after[name].shape) for name, (dtype, start, end) in places.items()}


def copy_nested(content: Any, device: str | torch.device = "cpu") -> Any:
    """Return copies of containers and tensors, which other training does not change."""
    if isinstance(content, Tensor):
        return content.detach().to(device, copy=True)
    if isinstance(content, Mapping):
        return {name: copy_nested(value, device) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(copy_nested(value, device) for value in content)
    return copy.deepcopy(content)


def fits(content: Any, weights: Weights) -> bool:
    """Return whether a payload has all the tensors that some weights have, with their shapes.

    Example:
        >>> fits({"w": torch.zeros(2), "v": torch.zeros(1)}, {"w": torch.ones(2)}), fits([1], {"w": torch.ones(2)})
        (True, False)
    """
    return isinstance(content, Mapping) and all(
        isinstance(content.get(name), Tensor) and content[name].shape == value.shape for name, value in weights.items()
    )
