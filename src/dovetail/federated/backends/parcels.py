"""Pickled content whose tensors and arrays are not copied into the pickle, and memory in which they travel."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor

__all__ = ["NOTE_SIZE", "Block", "Mailbox", "Parcel", "Place", "copied", "opened", "packed"]

# Where something lies in a block: its first byte, and how many there are.
Place = tuple[int, int]

# As torch's own memory: some kernels round differently where data begin elsewhere.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Parcel:
    """Content to be sent.

    Attributes:
        content: All of it but the bulk, pickled.
        bulk: The memory of tensors and arrays, each once, in the order in which `opened` needs them.

    Example:
        >>> parcel = packed({"w": torch.ones(3), "same": 1})
        >>> [part.nbytes for part in parcel.bulk]
        [12]
        >>> opened(parcel.content, map(copied, parcel.bulk))
        {'w': tensor([1., 1., 1.]), 'same': 1}
    """

    content: bytes
    bulk: list[memoryview]


def packed(content: Any, known: Mapping[int, int] | None = None) -> Parcel:
    """Pickle anything, functions and classes of a script included; the bulk stays where it is.

    Args:
        content: What is sent.
        known: Numbers, by identity, of what whoever opens it has already.
    """
    bulk: list[memoryview] = []
    file = io.BytesIO()
    # A callback that returns nothing, as `append` does, keeps the bulk out of the pickle.
    pickler = (_Pickler if known is None else _BriefPickler)(
        file, protocol=5, buffer_callback=lambda part: bulk.append(part.raw())
    )
    pickler.known = known
    pickler.dump(content)
    return Parcel(file.getvalue(), bulk)


def opened(content: bytes, bulk: Iterable[Any], known: Sequence[Any] = ()) -> Any:
    """Return what was packed. Its tensors are in the memory that is given; they may be changed if that may be.

    Only for what a process of our own has packed.

    Args:
        content: Of the parcel.
        bulk: Of the parcel, or copies.
        known: What the parcel names by numbers only.
    """
    unpickler: Any = pickle.Unpickler(io.BytesIO(content), buffers=bulk)  # noqa: S301 - our own process's, no file
    unpickler.persistent_load = known.__getitem__
    return unpickler.load()


def copied(part: Any) -> memoryview:
    """Return a copy of some memory, placed as torch places its own."""
    target = _space(memoryview(part).nbytes)
    target[:] = part
    return target


class Block:
    """Memory that several processes have. It has no name, so nothing is left of it however they end.

    Args:
        descriptor: Of a block that another process has made; None for a new one.

    Example:
        >>> block = Block()
        >>> places = block.write([memoryview(b"fish"), memoryview(b"chips")])
        >>> [bytes(block.read(place)) for place in places]
        [b'fish', b'chips']
        >>> block.close()
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _nameless() if descriptor is None else descriptor
        # Also where an error leaves nobody to close it.
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self._end = 0
        self._view = torch.empty(0, dtype=torch.uint8)

    def write(self, parts: Sequence[memoryview]) -> list[Place]:
        """Put memory here, over what was here before, and return where each part lies now."""
        self._end = 0
        return [self.append(part) for part in parts]

    def append(self, part: memoryview) -> Place:
        """Put memory behind what was put here last, and return where it lies."""
        start, done = self._end, 0
        while done < part.nbytes:
            done += os.pwrite(self.descriptor, part[done:], start + done)
        self._end = start + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        return start, part.nbytes

    def read(self, place: Place) -> memoryview:
        """Return a copy."""
        start, length = place
        # Mapped once and copied by torch, which takes a third of the time of a system call that reads.
        if self._view.numel() < start + length:
            self._view = torch.frombuffer(mmap.mmap(self.descriptor, 0), dtype=torch.uint8)
        return _memory(self._view[start : start + length].clone())

    def read_together(self, places: Sequence[Place]) -> list[memoryview]:
        """Return copies of what was written together; whoever keeps one keeps all of them in memory."""
        start, end = places[0][0], sum(places[-1])
        whole = self.read((start, end - start))
        return [whole[first - start : first - start + length] for first, length in places]

    def mapped(self) -> memoryview:
        """Return all of the block without copying it; what is changed is changed for this process alone."""
        size = os.fstat(self.descriptor).st_size
        return memoryview(mmap.mmap(self.descriptor, size, flags=mmap.MAP_PRIVATE) if size else b"")

    def close(self) -> None:
        """Let go of it. It is freed when all processes have."""
        self._closing()
        self._view = torch.empty(0, dtype=torch.uint8)


class Mailbox:
    """What goes from one process to another: where the next letter lies is said by a short note.

    A letter may be written before the one before was read, not earlier.

    Args:
        descriptors: Of the blocks of a mailbox that another process has made; None for a new one.

    Example:
        >>> here = Mailbox()
        >>> there = Mailbox([os.dup(each) for each in here.descriptors])
        >>> note = here.post({"hot": True}, [memoryview(b"fish")])
        >>> content, (part,) = there.fetch(note)
        >>> content, bytes(part)
        ({'hot': True}, b'fish')
        >>> here.close(), there.close()
        (None, None)
    """

    def __init__(self, descriptors: Sequence[int] | None = None) -> None:
        self._blocks = deque(map(Block, (None, None) if descriptors is None else descriptors))

    @property
    def descriptors(self) -> list[int]:
        """Of its blocks, the next one in front."""
        return [block.descriptor for block in self._blocks]

    def post(self, content: Any, bulk: Sequence[memoryview] = ()) -> bytes:
        """Put a letter with its bulk here, and return the note that says where, of `NOTE_SIZE` bytes."""
        block = self._next()
        places = block.write(bulk)
        return _NOTE.pack(*block.append(memoryview(pickle.dumps((content, places)))))

    def fetch(self, note: bytes) -> tuple[Any, list[memoryview]]:
        """Return a letter, and copies of its bulk. Only for what a process of our own has posted."""
        block = self._next()
        content, places = pickle.loads(block.read(_NOTE.unpack(note)))  # noqa: S301 - our own process's, no file
        # One by one: what is kept of a letter keeps no more than that in memory.
        return content, list(map(block.read, places))

    def close(self) -> None:
        """Let go of the memory."""
        for block in self._blocks:
            block.close()

    def _next(self) -> Block:
        self._blocks.rotate(-1)
        return self._blocks[-1]


_NOTE = struct.Struct("=QQ")
NOTE_SIZE = _NOTE.size


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, piece: Any) -> Any:
        if type(piece) is Tensor and _is_plain(piece):
            place = piece.dtype, piece.storage_offset(), tuple(piece.shape), piece.stride()
            return _tensor, (piece.untyped_storage(), *place)
        if type(piece) is torch.UntypedStorage and piece.device.type == "cpu":
            return _storage, (pickle.PickleBuffer(_memory(torch.empty(0, dtype=torch.uint8).set_(piece))),)
        return super().reducer_override(piece)


class _BriefPickler(_Pickler):
    known: Mapping[int, int]

    def persistent_id(self, piece: Any) -> int | None:
        return self.known.get(id(piece))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its storage and a place therein, and nothing else."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _storage(memory: Any) -> torch.UntypedStorage:
    if memoryview(memory).nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _space(length: int) -> memoryview:
    return _memory(torch.empty(length, dtype=torch.uint8))


def _memory(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def _nameless() -> int:
    if sys.platform == "linux":
        return os.memfd_create("dovetail")
    else:  # noqa: RET505 - so that the checker of types sees that this is for other systems
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
