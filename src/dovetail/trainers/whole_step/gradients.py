"""Gradients of compiled steps outside of a graph: buffers for accumulation, exchange and hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.accelerators import widest_float

SLOT = "gradient"


class GradientBuffers(Optimizer):
    """The gradients of parameters, as an optimizer whose update adds a gradient to a buffer.

    A `WholeStep` with these in place of an optimizer computes a batch and its gradients, and updates no weights. The
    buffers are the `grad` of the parameters, as after an eager backward pass.

    Args:
        parameters: The parameters that are trained.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> buffers = GradientBuffers([weight])
        >>> buffers.expose([weight])
        >>> weight.grad is None  # No graph has computed it yet.
        True
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__([*parameters], {"lr": 1.0, "items": 1, "expected": 1, "size": 1, "opens": True})

    def set_numbers(self, *, items: Any, expected: Any, size: int, opens: bool, scale: float | None) -> None:
        """Set the numbers of the next batch.

        Args:
            items: The items of the batch, if the step does not return `num_items`.
            expected: The items by which a loss of the window is divided; not used for its first batch.
            size: The batches of a full window.
            opens: True for the first batch of a window, which overwrites the buffers.
            scale: The loss scale of float16, or None.
        """
        (group,) = self.param_groups
        group.update(lr=1.0 if scale is None else scale, items=items, expected=expected, size=size, opens=opens)

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy gradients of the running window that other code computed into the buffers, before a batch is added."""
        for parameter in parameters:
            buffer = self.state[parameter].get(SLOT)
            if buffer is None or parameter.grad is buffer:
                continue
            # Without a gradient: an earlier batch of the window did not use this parameter.
            buffer.zero_() if parameter.grad is None else buffer.copy_(parameter.grad)

    def expose(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the `grad` of parameters to their buffers, and call the hooks that wait for a gradient."""
        for parameter in parameters:
            parameter.grad = self.state[parameter].get(SLOT)
            hooks: Mapping[int, Any] | None = parameter._post_accumulate_grad_hooks
            for hook in tuple((hooks or {}).values()):
                hook(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise: a graph changes the buffers."""
        raise NotImplementedError("buffers of gradients are changed by a graph only")


class AccumulationRule:
    """Adds the gradients of a batch to the buffers of its accumulation window, weighted by items as in `Window`."""

    settings = ("items", "expected", "size", "opens")

    def terms(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return whether a loss is weighted: only if a window has several batches."""
        return (group["size"] > 1,)

    def numbers(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the numbers of a batch: the loss scale first."""
        return tuple(float(group[name]) for name in ("lr", *self.settings))

    def slots(self, optimizer: Optimizer, parameter: nn.Parameter, terms: tuple[Any, ...]) -> tuple[str, ...]:
        """Return the name of the buffer."""
        return (SLOT,)

    def weighted(self, loss: Tensor, outputs: Mapping[str, Any], numbers: Sequence[Tensor], terms: Any) -> Tensor:
        """Return the loss for the backward pass: weighted by its items, and scaled."""
        scale, items, expected, size, opens = numbers
        if terms[0]:
            found = outputs.get("num_items", items)
            items = found if isinstance(found, Tensor) else torch.full_like(items, found)
            # In the widest type, as in `Window`.
            wide = widest_float(items.device.type)
            items, expected, size = items.to(wide), expected.to(wide), size.to(wide)
            expected = torch.where(opens > 0, torch.where(items > 0, items, 1.0) * size, expected)
            loss = loss * (items / expected).to(loss.dtype)
        return loss * scale.to(loss.dtype)

    def update(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[Tensor],
        terms: Any,
    ) -> None:
        """Add the gradients to the buffers; the first batch of a window overwrites them."""
        opens = numbers[-1] > 0
        for gradient, state in zip(gradients, states, strict=True):
            buffer = state[SLOT]
            buffer.copy_(torch.where(opens, 0.0, buffer) + gradient if terms[0] else gradient)
