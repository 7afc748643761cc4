"""Copies of tensors to host memory that do not wait for the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from dovetail.accelerators import can_pin
from dovetail.data.batches import map_tensors


class HostCopies:
    """Copies structures of tensors to host memory without waiting for the device, until their values are used.

    A copy goes to pinned memory, on the current stream. It moves to ordinary memory when it has arrived, because
    pinned memory is scarce. Tensors of devices that cannot do this, such as Apple's, are copied at once.

    Example:
        >>> copies = HostCopies()
        >>> copies.add({"x": torch.ones(2)})
        >>> copies.values()
        [{'x': tensor([1., 1.])}]
    """

    def __init__(self) -> None:
        self._arrived: list[Any] = []
        self._started: deque[tuple[Any, list[torch.Event]]] = deque()

    def add(self, values: Any) -> None:
        """Start the copy of all tensors in a structure."""
        devices: set[torch.device] = set()

        def start(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if tensor.layout is not torch.strided or tensor.is_nested or not can_pin(tensor.device.type):
                return tensor.cpu()
            devices.add(tensor.device)
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            return pinned.copy_(tensor, non_blocking=True)

        copied = map_tensors(start, values)
        self._started.append((copied, [torch.accelerator.current_stream(it).record_event() for it in devices]))
        while self._started and all(event.query() for event in self._started[0][1]):
            self._keep_first()

    def values(self) -> list[Any]:
        """Return all copies in order. This waits for the device only if it has not finished them."""
        while self._started:
            for event in self._started[0][1]:
                if not event.query():
                    event.synchronize()
            self._keep_first()
        return self._arrived

    def _keep_first(self) -> None:
        copied, events = self._started.popleft()
        self._arrived.append(map_tensors(_unpinned, copied) if events else copied)


def _unpinned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_pinned() else tensor
