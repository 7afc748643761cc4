"""An update of an optimizer, without what torch does around it for whoever watches."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def make_update(optimizer: Optimizer) -> None:
    """Make an update, as `optimizer.step()` does.

    Around the update itself, torch gives it a name for profilers and calls hooks. That takes a third of a small step's
    update, so it is left out where there is neither a profiler nor a hook. Whatever else is around it is called: what a
    scheduler of torch, a user or another library has put in the place of `step`.

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


# What torch puts around the `step` of every class, known by its code: a decorator of somebody else's may have taken
# over its name and its marks.
_AROUND = Optimizer.profile_hook_step(lambda: None).__code__
_EVERY_PRE_HOOK = torch_optimizer._global_optimizer_pre_hooks
_EVERY_POST_HOOK = torch_optimizer._global_optimizer_post_hooks
