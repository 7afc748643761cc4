"""Checks of a model that several processes train."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dovetail.distributed import is_part
from dovetail.errors import ConfigError


def check_weights(model: nn.Module | None) -> None:
    """Raise if a module has no weights yet, because it waits for the shape of its first batch.

    Raises:
        ConfigError: The model has a lazy module.
    """
    for name, module in model.named_modules() if model is not None else ():
        if any(is_lazy(it) for it in chain(module.parameters(recurse=False), module.buffers(recurse=False))):
            raise ConfigError(
                f"{_shown(name, module)} has no weights before its first batch, and all processes must start with the "
                "same weights: call the model with one batch before you train it"
            )


def check_gradients(model: nn.Module) -> None:
    """Raise if a module computes sparse gradients, which torch cannot shard.

    Raises:
        ConfigError: The model has such a module.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"{_shown(name, module)} computes sparse gradients, which cannot be sharded: build it with "
                "sparse=False, or train copies of the model with DDPTrainer"
            )


def _shown(name: str, module: nn.Module) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def without_parts(inputs: Any) -> tuple[Any, ...]:
    """Return the inputs of a backward pass as a tuple; raise if one of them is a part of a parameter."""
    chosen = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if any(map(is_part, chosen)):
        raise ConfigError(
            "inputs: a sharded parameter is not in the graph of a loss, so it would get no gradient; leave out "
            "inputs=…, and freeze the other parameters with requires_grad_(False) before the model is called"
        )
    return chosen
