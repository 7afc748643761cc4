"""Accumulation window: the batches that share one update, and the weight of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail.accelerators import widest_float


class Window:
    """The accumulation window: the batches that share one update, and the weight of each.

    A loss is a mean over the items of its batch. The gradient of one large batch is therefore the mean of the
    micro-batches' gradients *weighted by their items*. The number of items in a window is unknown when its first loss
    is differentiated, so each loss is divided by the expected items (the size of the window times the items of
    its first batch), and the gradients are rescaled when the window closes. In the usual case, equal batches and
    a full window, that factor is exactly one and costs nothing.

    A step by hand may keep its gradients, and another loss of the same batch adds to them. The rescaling of the kept
    gradients is then undone before, so that old and new gradients have the same divisor and are rescaled together.

    Attributes:
        size: Batches in a full window.
        opens: True if the running batch is the first of its window.
        closes: True if the running batch is the last of its window, so that optimizers really step.
        rescales: False if a layer divides the gradients by the items of the window itself.
    """

    __slots__ = (
        "_deferred",
        "_expected",
        "_items",
        "_kept",
        "_position",
        "_settled",
        "closes",
        "opens",
        "rescales",
        "size",
    )

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.opens = True
        self.closes = True
        self.rescales = True
        self._position = 0
        self._expected: Any = 1
        self._items: Any = 0
        self._deferred: list[Optimizer] = []
        # The factors by which gradients were rescaled since the last loss, by the ids of their parameters.
        self._settled: dict[int, Any] = {}
        # Optimizers that stepped in the running batch and kept their gradients.
        self._kept: list[Optimizer] = []

    def start_batch(self, *, is_last: bool) -> None:
        """Add a batch to the window; `is_last` closes the window at the end of an epoch."""
        self._position = 1 if self.closes else self._position + 1
        self.opens = self._position == 1
        self.closes = is_last or self._position == self.size
        if self.opens:
            self._items = 0
            # Left over from a window that an error interrupted.
            self._deferred.clear()
            self._kept.clear()

    def weight(self, num_items: Any, *, first_of_batch: bool) -> Any:
        """Return the factor for a loss over `num_items` items of the running batch."""
        if isinstance(num_items, Tensor):
            # An integer count would be divided in float32, which is too inexact for a float64 loss.
            num_items = num_items.to(widest_float(num_items.device.type))
        # Several losses of one batch have the same items, which count once.
        if first_of_batch:
            if self.opens:
                self._expected = positive(num_items) * self.size
            self._items = self._items + num_items
        if self._kept:
            self._unsettle()
        self._settled.clear()
        return num_items / self._expected

    @property
    def num_batches(self) -> int:
        """The number of batches in the window so far."""
        return max(self._position, 1)

    @property
    def items(self) -> Any:
        """The items of the window so far, if several batches share it."""
        return self._items

    @items.setter
    def items(self, items: Any) -> None:
        self._items = items

    @property
    def expected(self) -> Any:
        """The items by which a loss of the window is divided, if several batches share it."""
        return self._expected

    @property
    def correction(self) -> Any:
        """The factor that turns the gradients of the window so far into the gradients of one large batch."""
        return self._expected / positive(self._items)

    def settle(self, optimizer: Optimizer) -> None:
        """Rescale the gradients to equal the gradients of one large batch, when all items of the window are known."""
        # It steps now, so its request from an earlier batch of the window is done.
        if optimizer in self._deferred:
            self._deferred.remove(optimizer)
        factor = self.correction
        # Comparing a tensor would wait for the device, so a tensor is always multiplied.
        if self.rescales and (isinstance(factor, Tensor) or factor != 1.0):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # Another optimizer with the same parameter has rescaled its gradient.
                    if id(parameter) in self._settled:
                        continue
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
                    # Also without a gradient: the average may give it the gradient of other processes.
                    self._settled[id(parameter)] = factor

    def keep(self, optimizer: Optimizer) -> None:
        """Record that an optimizer stepped without clearing its gradients, to which another loss may add."""
        self._kept.append(optimizer)

    def defer(self, optimizers: Iterable[Optimizer]) -> None:
        """Store optimizers whose step was requested before the window closes."""
        self._deferred += [optimizer for optimizer in optimizers if optimizer not in self._deferred]

    def take_deferred(self) -> list[Optimizer]:
        """Return and clear the deferred optimizers that did not step when the window closed."""
        waiting, self._deferred = self._deferred, []
        # The batch has no further loss.
        self._kept.clear()
        return waiting

    def _unsettle(self) -> None:
        """Undo the rescaling of kept gradients."""
        parameters = (it for each in self._kept for group in each.param_groups for it in group["params"])
        for parameter in parameters:
            # Taken out, because several optimizers may have the same parameter.
            factor = self._settled.pop(id(parameter), None)
            if factor is not None and parameter.grad is not None:
                parameter.grad.div_(factor)
        self._kept.clear()


def positive(num_items: Any) -> Any:
    """Return a number of items as a divisor: 1 in place of 0, because batches without items have no gradients."""
    return torch.where(num_items > 0, num_items, 1.0) if isinstance(num_items, Tensor) else num_items or 1


class Lookahead:
    """Iterates over a loader without a length, one batch ahead, so that the last batch is known."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.is_last = False

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._batches)
        end = object()
        batch = next(batches, end)
        while batch is not end:
            following = next(batches, end)
            self.is_last = following is end
            yield batch
            batch = following
