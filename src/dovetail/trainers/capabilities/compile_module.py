"""Compilation of a model by `torch.compile`: as a whole, or block by block if it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def compile_module(model: nn.Module, backend: str) -> Callable[[], None]:
    """Compile a model in place, so that the keys of its state do not change, and return a function for the run's end.

    The hooks of FSDP gather and free the weights of a block, and cannot be a part of a graph. So the `forward` of
    every block is compiled, which the hooks surround, until the returned function is called: a copy of a block would
    call the compiled `forward` of the original. A model that is not sharded stays compiled.

    Args:
        model: The model.
        backend: A backend of `torch.compile`.
    """
    blocks = _sharded_blocks(model)
    if not blocks:
        if model._compiled_call_impl is None:
            # As `module.compile()` does it.
            model._compiled_call_impl = _compiled(model._call_impl, backend)
        return lambda: None
    own = [block for block in blocks if "forward" not in vars(block)]
    for block in own:
        block.forward = _compiled(block.forward, backend)

    def undo() -> None:
        for block in own:
            del block.forward

    return undo


def _compiled(call: Callable[..., Any], backend: str) -> Callable[..., Any]:
    # A wrapper of ours: Dynamo skips functions that torch defines, such as the call of an `nn.Sequential`.
    compiled: Callable[..., Any] = torch.compile(lambda *args, **kwargs: call(*args, **kwargs), backend=backend)
    return compiled


def _sharded_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP gathers as a whole; an empty list if a model is not sharded."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [module for module in sharded if sum(isinstance(it, FSDPModule) for it in module.modules()) == 1]
