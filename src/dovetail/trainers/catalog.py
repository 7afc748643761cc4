"""Registries of losses, optimizers and schedulers by name, and a check for classification losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dovetail.registry import Registry
from dovetail.trainers import other_libraries
from dovetail.trainers.optimizers import LARS, AdaHessian
from dovetail.trainers.schedules.whole_run import SHAPES, RunSchedule

# Each registry lists the classes when it is first read.
losses: Registry[Any] = Registry("loss", lambda: _classes(nn, nn.modules.loss._Loss), other_libraries.LOSSES)
optimizers: Registry[Any] = Registry(
    "optimizer", lambda: {**_classes(torch.optim, Optimizer), "AdaHessian": AdaHessian, "LARS": LARS}
)
schedulers: Registry[Any] = Registry(
    "scheduler",
    lambda: {
        **_classes(torch_schedulers, LRScheduler),
        "ReduceLROnPlateau": ReduceLROnPlateau,
        **{shape: RunSchedule(shape) for shape in SHAPES},
    },
)


def classifies(criterion: Any) -> bool:
    """Return whether a loss or a class of losses is a classification loss, so that the accuracy is a valid metric."""
    kind = criterion if isinstance(criterion, type) else type(criterion)
    if issubclass(kind, (nn.CrossEntropyLoss, nn.NLLLoss)) or getattr(criterion, "is_classification", False) is True:
        return True
    return criterion in (nn.functional.cross_entropy, nn.functional.nll_loss)


def is_torch_loss(criterion: Any) -> bool:
    """Return whether a loss is a module or a function of torch; these raise obscure errors if targets are missing."""
    return isinstance(criterion, nn.modules.loss._Loss) or criterion in _FUNCTIONS


def takes_numbers(criterion: Any) -> bool:
    """Return whether a loss of torch compares outputs with floating-point targets, such as the squared error."""
    criterion = getattr(criterion, "mean", criterion) if isinstance(criterion, nn.Module) else criterion
    return isinstance(criterion, _OF_NUMBERS)


_OF_NUMBERS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
    nn.MultiLabelSoftMarginLoss,
)

# `nn.functional` marks its losses by their names alone.
_FUNCTIONS = tuple(
    function
    for name, function in vars(nn.functional).items()
    if name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits"))
)


def _classes(module: Any, kind: type[Any]) -> dict[str, type[Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, kind) and value is not kind and not name.startswith("_")
    }
