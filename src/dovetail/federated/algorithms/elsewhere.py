"""A loss at other weights than those of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dovetail.trainers.modules import forward_with

__all__ = ["loss_elsewhere"]


class _WholeLoss(nn.Module):
    """The model with all that is made of it, so that other weights are seen by every part: a penalty of them, too."""

    def __init__(self, model: nn.Module, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, *arguments: Any) -> Tensor:
        return self.compute(*arguments)


def loss_elsewhere(
    model: nn.Module, weights: Mapping[str, Tensor], compute: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    """Return what a function computes while the model has other weights; its gradient flows into those.

    Buffers stay as they are: statistics that BatchNorm keeps are of the model's own weights.

    Args:
        model: Whose weights the function looks at.
        weights: By name, in place of the model's parameters; those that are not named are its own.
        compute: The function.
        arguments: Of the function.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss_elsewhere(model, {"weight": torch.tensor([[3.0]])}, lambda: model(torch.ones(1, 1)).sum())
        tensor(3.)
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    taken = {f"model.{name}": value for name, value in {**buffers, **weights}.items()}
    loss: Tensor = forward_with(_WholeLoss(model, compute), taken, arguments)
    return loss
