"""State that a batch with weight zero must not change: gradients of the accumulation window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from dovetail.trainers.window import Window


class IdleWindow:
    """Gradients and items of an accumulation window whose last batches have weight zero.

    Args:
        window: The window, after the last batch of this process that counts.
        optimizers: The optimizers of the run.
    """

    def __init__(self, window: Window, optimizers: Iterable[Optimizer]) -> None:
        self.items: Any = window.items
        self._window = window
        self._parameters = [it for each in optimizers for group in each.param_groups for it in group["params"]]
        # The same division as at the end of the window, by the items that count.
        factor = window.correction
        self._gradients = {it: None if it.grad is None else it.grad.detach() * factor for it in self._parameters}

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop the gradients of a backward pass, and the items of its batch.

        Otherwise they would be part of a second update of the batch, of which `restore` knows nothing.
        """
        parameters = self._parameters
        own, self._window.items = [it.grad for it in parameters], self.items
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, gradient in zip(parameters, own, strict=True):
            if gradient is None and parameter.grad is not None:
                # Not None: code of the user may change it in place.
                gradient = torch.zeros_like(parameter.grad)
            parameter.grad = gradient

    def restore(self, optimizer: Optimizer) -> None:
        """Restore the gradients of an optimizer, for its first update only.

        A compiled step, or a layer that computes gradients itself, adds to them without `dropping`.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._gradients:
                    parameter.grad = self._gradients.pop(parameter)
