"""Copies of batches to an accelerator: from pinned memory, on a separate stream, started one batch ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from dovetail.accelerators import can_pin, numbered
from dovetail.data import DataLoader, to_device
from dovetail.data.batches import map_leaves, map_tensors, moves_itself
from dovetail.data.slicing import rows_in_memory
from dovetail.overrides import is_ours

if TYPE_CHECKING:
    from dovetail.trainers.context import Stage
    from dovetail.trainers.single_process import SingleProcessTrainer

Move = Callable[[Any, torch.device], Any]
"""Returns a batch with its tensors on a device."""


def batch_mover(memory_format: str | None, device: torch.device) -> Move:
    """Return the function that moves a batch to a device, in a memory format."""
    if device.type != "cpu" and can_pin(device.type):
        return DeviceCopier(memory_format, device)
    return to_device if memory_format is None else _to_device_channels_last


def channels_last(tensor: Tensor) -> Tensor:
    """Return images with the channels last in memory, and any other tensor unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


class DeviceCopier:
    """Copies batches to an accelerator without waiting for it.

    A copy runs on its own stream, so it overlaps with the computation that the device was given before. The stream of
    the computation waits for the copy; the host does not. `start` starts the copy of a batch before it is needed, and
    the later call with the same object returns this copy.

    Args:
        memory_format: `channels_last`, or None for no change.
        device: The device.
    """

    def __init__(self, memory_format: str | None, device: torch.device) -> None:
        self._settings = memory_format, device
        self._device = numbered(device)
        self._stream = _side_stream(self._device)
        self._started: list[_Copy] = []

    def __call__(self, batch: Any, device: torch.device) -> Any:
        """Return the batch on the device, for the current stream."""
        if numbered(device) != self._device:
            return batch_mover(self._settings[0], device)(batch, device)
        for number, copy in enumerate(self._started):
            if copy.batch is batch:
                del self._started[number]
                return self._finish(copy)
        return self._finish(self._copy(batch))

    def start(self, batch: Any) -> None:
        """Start the copy of a batch that is needed later."""
        try:
            self._started.append(self._copy(batch))
        except RuntimeError:
            # For example, the memory of the device is full. The copy is repeated, and the error raised, when the
            # batch is used: the memory may be free by then.
            return

    def read(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, after starting its copy; `END` if there is none."""
        batch = next(batches, END)
        if batch is not END:
            self.start(batch)
        return batch

    def forget(self, batch: Any) -> None:
        """Release the copy of a batch that was started and is not needed."""
        self._started = [copy for copy in self._started if copy.batch is not batch]

    def __reduce__(self) -> tuple[Any, ...]:
        # Streams cannot be copied or sent to another process.
        return batch_mover, self._settings

    def _copy(self, batch: Any) -> _Copy:
        stream = self._stream if all(map(_may_use_side_stream, _leaves(batch))) else None
        if stream is None:
            return _Copy(batch, self._moved(batch), None)
        with stream:
            moved = self._moved(batch)
            return _Copy(batch, moved, None if moved is batch else stream.record_event())

    def _moved(self, batch: Any) -> Any:
        moved = to_device(batch, self._device, non_blocking=True)
        return moved if self._settings[0] is None else map_tensors(channels_last, moved)

    def _finish(self, copy: _Copy) -> Any:
        if copy.event is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(copy.event)
            for tensor in _leaves(copy.moved):
                if isinstance(tensor, Tensor):
                    # Otherwise the memory could be given to the next copy while a kernel of this stream reads it.
                    tensor.record_stream(current)
        return copy.moved


def copier_ahead(trainer: SingleProcessTrainer, stage: Stage) -> DeviceCopier | None:
    """Return the object that may copy a batch to the device before it is used; None if the loop copies it."""
    move, context = trainer._move, trainer.context
    if not isinstance(move, DeviceCopier) or context.run.trainer is None:
        return None
    # A hook or an override of the user may change a batch before it is copied.
    changes = stage == "train" and any(map(_changes_batch, context.callbacks.on_step_start))
    own = [it for verb in ("batches", "to_device") for it in context.run.trainer._customized_by(verb)]
    return None if changes or not all(map(is_ours, own)) else move


def _changes_batch(hook: Any) -> bool:
    return getattr(getattr(hook, "__self__", None), "changes_batch", True)


def draws_nothing(loader: Any) -> bool:
    """Return whether reading a batch draws no random numbers of this process, except for the first batch of a pass."""
    if type(loader) in (list, tuple):
        return True
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.draws_at_start and (loader.num_workers > 0 or rows_in_memory(loader) is not None)


END = object()
"""The result of `DeviceCopier.read` after the last batch."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A started copy: the batch on the host, the batch on the device, and the event at the end of the copy."""

    batch: Any
    moved: Any
    event: torch.Event | None


def _side_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream of a device; None if it has only one."""
    try:
        stream = torch.Stream(device=device)
        stream.record_event().query()
    except (RuntimeError, NotImplementedError):
        return None
    return stream


def _leaves(batch: Any) -> Iterator[Any]:
    found: list[Any] = []

    def collect(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(collect, batch)
    return iter(found)


def _may_use_side_stream(leaf: Any) -> bool:
    """Return whether a leaf is not moved, or is a tensor of the host whose copy a stream can record."""
    if isinstance(leaf, Tensor):
        # The stream that computes a tensor of a device may not have finished when the side stream reads it.
        return leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_nested
    return not moves_itself(leaf)


def _to_device_channels_last(batch: Any, device: torch.device) -> Any:
    return map_tensors(channels_last, to_device(batch, device))
