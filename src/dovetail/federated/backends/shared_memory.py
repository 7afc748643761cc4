"""Pickling without copies of tensors and arrays, and shared memory for their transfer."""

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

# The position of data in a block: the first byte and the number of bytes.
Place = tuple[int, int]

# The alignment of torch's memory: some kernels round differently with another one.
_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedMessage:
    """Content to be sent.

    Attributes:
        content: The pickled content without the bulk.
        bulk: The memory of tensors and arrays, each once, in the order that `unpack` needs.

    Example:
        >>> message = pack({"w": torch.ones(3), "same": 1})
        >>> [part.nbytes for part in message.bulk]
        [12]
        >>> unpack(message.content, map(copy_aligned, message.bulk))
        {'w': tensor([1., 1., 1.]), 'same': 1}
    """

    content: bytes
    bulk: list[memoryview]


def pack(content: Any, known: Mapping[int, int] | None = None) -> PackedMessage:
    """Pickle anything, also functions and classes of a script; the bulk is not copied.

    Objects whose `id` is in `known` are replaced by their number, because the receiver has them.
    """
    bulk: list[memoryview] = []
    file = io.BytesIO()
    # A callback that returns nothing, as `append` does, keeps the bulk out of the pickle.
    pickler = (_Pickler if known is None else _ReferencePickler)(
        file, protocol=5, buffer_callback=lambda part: bulk.append(part.raw())
    )
    pickler.known = known
    pickler.dump(content)
    return PackedMessage(file.getvalue(), bulk)


def unpack(content: bytes, bulk: Iterable[Any], known: Sequence[Any] = ()) -> Any:
    """Return the content of a message that a process of this program has packed.

    Its tensors use the memory of `bulk`, which is the bulk of the message or copies. `known` are the objects that the
    message has as numbers only.
    """
    unpickler: Any = pickle.Unpickler(io.BytesIO(content), buffers=bulk)  # noqa: S301 - our own process's, no file
    unpickler.persistent_load = known.__getitem__
    return unpickler.load()


def copy_aligned(part: Any) -> memoryview:
    """Return a copy of memory with the alignment of torch."""
    target = _memory(torch.empty(memoryview(part).nbytes, dtype=torch.uint8))
    target[:] = part
    return target


class Block:
    """Memory that several processes share. It has no name, so the system frees it however they end.

    Args:
        descriptor: The file descriptor of a block that another process created. None means a new block.

    Example:
        >>> block = Block()
        >>> places = block.write([memoryview(b"fish"), memoryview(b"chips")])
        >>> [bytes(block.read(place)) for place in places]
        [b'fish', b'chips']
        >>> block.close()
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _create_anonymous_file() if descriptor is None else descriptor
        # Also closed if an error prevents `close`.
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self._end = 0
        self._view = torch.empty(0, dtype=torch.uint8)

    def write(self, parts: Sequence[memoryview]) -> list[Place]:
        """Overwrite the block with memory, and return the position of each part."""
        self._end = 0
        return [self.append(part) for part in parts]

    def append(self, part: memoryview) -> Place:
        """Append memory, and return its position."""
        start, done = self._end, 0
        # A write may be partial, for example above 2 GB on Linux.
        while done < part.nbytes:
            done += os.pwrite(self.descriptor, part[done:], start + done)
        self._end = start + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        return start, part.nbytes

    def read(self, place: Place) -> memoryview:
        """Return a copy."""
        start, length = place
        # Mapped once and copied by torch, which takes a third of the time of a read.
        if self._view.numel() < start + length:
            self._view = torch.frombuffer(mmap.mmap(self.descriptor, 0), dtype=torch.uint8)
        return _memory(self._view[start : start + length].clone())

    def read_together(self, places: Sequence[Place]) -> list[memoryview]:
        """Return copies of adjacent parts, which share one piece of memory."""
        start, end = places[0][0], sum(places[-1])
        whole = self.read((start, end - start))
        return [whole[first - start : first - start + length] for first, length in places]

    def map_private(self) -> memoryview:
        """Return the whole block without copying it; changes are visible in this process only."""
        size = os.fstat(self.descriptor).st_size
        return memoryview(mmap.mmap(self.descriptor, size, flags=mmap.MAP_PRIVATE) if size else b"")

    def close(self) -> None:
        """Close the block. It is freed when all processes have closed it."""
        self._closing()
        self._view = torch.empty(0, dtype=torch.uint8)


class Mailbox:
    """Shared memory for messages to another process; a short note has the position of the next message.

    At most one message may be unread when the next one is written.

    Args:
        descriptors: The descriptors of a mailbox that another process created. None means a new mailbox.

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
        # Two blocks in turn: the sender writes the next message while the receiver still reads the last one.
        self._blocks = deque(map(Block, (None, None) if descriptors is None else descriptors))

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of its blocks, the next one first."""
        return [block.descriptor for block in self._blocks]

    def post(self, content: Any, bulk: Sequence[memoryview] = ()) -> bytes:
        """Write a message with its bulk, and return the note with its position, of `NOTE_SIZE` bytes."""
        block = self._next()
        places = block.write(bulk)
        return _NOTE.pack(*block.append(memoryview(pickle.dumps((content, places)))))

    def fetch(self, note: bytes) -> tuple[Any, list[memoryview]]:
        """Return a message of a process of this program, and copies of its bulk."""
        block = self._next()
        content, places = pickle.loads(block.read(_NOTE.unpack(note)))  # noqa: S301 - our own process's, no file
        # One by one, so that a tensor does not keep the whole message in memory.
        return content, list(map(block.read, places))

    def close(self) -> None:
        """Close the blocks."""
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
            # By storage, so that views of one storage still share it after the transfer.
            place = piece.dtype, piece.storage_offset(), tuple(piece.shape), piece.stride()
            return _tensor, (piece.untyped_storage(), *place)
        if type(piece) is torch.UntypedStorage and piece.device.type == "cpu":
            return _storage, (pickle.PickleBuffer(_memory(torch.empty(0, dtype=torch.uint8).set_(piece))),)
        return super().reducer_override(piece)


class _ReferencePickler(_Pickler):
    known: Mapping[int, int]

    def persistent_id(self, piece: Any) -> int | None:
        return self.known.get(id(piece))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is fully described by its storage, offset, shape and strides."""
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


def _memory(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def _create_anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("dovetail")
    else:  # noqa: RET505 - so that the checker of types sees that this is for other systems
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
