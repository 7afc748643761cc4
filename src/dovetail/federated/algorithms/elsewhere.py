"""Loss of a model at given weights, for algorithms that differentiate at a second point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dovetail.trainers.modules import forward_with


class _WholeLoss(nn.Module):
    """A model with its whole loss, so that every part sees the other weights, also a penalty."""

    def __init__(self, model: nn.Module, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, *arguments: Any) -> Tensor:
        return self.compute(*arguments)


def loss_elsewhere(
    model: nn.Module, weights: Mapping[str, Tensor], compute: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    """Return the result of a function while the model has other weights, which receive the gradient.

    `weights` replace the parameters of their names. Buffers, such as the statistics of BatchNorm, do not change.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss_elsewhere(model, {"weight": torch.tensor([[3.0]])}, lambda: model(torch.ones(1, 1)).sum())
        tensor(3.)
    """
    # Copies, so that batch norm does not count this batch a second time.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    taken = {f"model.{name}": value for name, value in {**buffers, **weights}.items()}
    loss: Tensor = forward_with(_WholeLoss(model, compute), taken, arguments)
    return loss
