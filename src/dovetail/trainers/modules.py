"""Models: construction from a module, class or function, and calls with a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from dovetail.errors import ConfigError


def as_module(model: Any) -> nn.Module | None:
    """Return the module itself, or the module that a class or a function builds."""
    if model is None or isinstance(model, nn.Module):
        return model
    module = model() if callable(model) else model
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, or a class or function that makes one, got {model!r}")
    return module


def forward(model: Any, inputs: Any) -> Any:
    """Call a model with one input, with several from a tuple or list, or with named ones from a mapping."""
    # The usual case first: a test of a tensor is cheaper than a test of a mapping.
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def entry_of(outputs: Any, name: str) -> Any:
    """Return an entry of outputs that are a mapping, or an attribute of another object; None if it is missing.

    Example:
        >>> entry_of({"logits": 1.0}, "logits"), entry_of({"logits": 1.0}, "loss")
        (1.0, None)
    """
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    return None if isinstance(outputs, (Tensor, list)) else getattr(outputs, name, None)


def forward_with(model: nn.Module, weights: Mapping[str, Tensor], inputs: Any) -> Any:
    """Call a model with other weights; weights that are not named remain the model's.

    Example:
        >>> import torch
        >>> forward_with(nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.ones(1, 2))
        tensor([[2.]])
    """
    if isinstance(inputs, Mapping):
        return functional_call(model, dict(weights), (), dict(inputs))
    return functional_call(model, dict(weights), tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))
