"""Tensors outside of the model, such as parameters of the loss, that all processes start with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.distributed import Group, is_part


def copy_criterion(group: Group, model: nn.Module | None, criterion: Any) -> None:
    """Copy the parameters and buffers of a criterion from the first process; a function has none."""
    if isinstance(criterion, nn.Module):
        _copy_outside(group, model, chain(criterion.parameters(), criterion.buffers()))


def copy_trained(group: Group, model: nn.Module | None, optimizers: Iterable[Optimizer]) -> None:
    """Copy the parameters that only the optimizers have, such as weights of losses, from the first process."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    _copy_outside(group, model, chain.from_iterable(it["params"] for it in groups))


def _copy_outside(group: Group, model: nn.Module | None, tensors: Iterable[Tensor]) -> None:
    # The model was copied before it was divided.
    known = set() if model is None else {*model.parameters(), *model.buffers()}
    with torch.no_grad():
        group.copy_first(it for it in tensors if it not in known and not is_part(it))
