"""Optimizer step without torch's overhead for profilers and hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def make_update(optimizer: Optimizer) -> None:
    """Make an update, like `optimizer.step()`.

    Torch wraps `step` to name it for profilers and to call hooks. The wrapper takes a third of the time of a small
    update, so it is skipped if there is neither a profiler nor a hook. Any other replacement of `step`, by a torch
    scheduler, a user or another library, is called.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor(1.0))
        >>> weight.grad = torch.tensor(2.0)
        >>> make_update(torch.optim.SGD([weight], lr=0.25))
        >>> weight.item()
        0.5
    """
    method: Any = type(optimizer).step
    if (
        getattr(method, "__code__", None) is not _AROUND
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _EVERY_PRE_HOOK
        or _EVERY_POST_HOOK
        or torch._C._autograd._profiler_enabled()
    ):
        optimizer.step()
    else:
        method.__wrapped__(optimizer)


# The code of torch's wrapper around `step`. Its name and attributes are not enough: a decorator of another library may
# have copied them.
_AROUND = Optimizer.profile_hook_step(lambda: None).__code__
_EVERY_PRE_HOOK = torch_optimizer._global_optimizer_pre_hooks
_EVERY_POST_HOOK = torch_optimizer._global_optimizer_post_hooks
