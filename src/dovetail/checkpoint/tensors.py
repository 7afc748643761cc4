"""Streaming reader and writer of the safetensors format, without a copy of the whole file in memory.

The format consists of eight bytes of header length, a JSON header, and the raw bytes of every tensor in the order of
the header's offsets. The `safetensors` package can read these files, but it builds a whole file in memory when it
writes, and returns memory maps of the file when it reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dovetail.checkpoint.files import CHUNK, Digest
from dovetail.checkpoint.strict_json import parse_json
from dovetail.errors import CheckpointError

if TYPE_CHECKING:
    import torch

DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
"""The supported dtypes: torch's name, the name in the format, and the bytes per element."""

_TORCH_NAMES = {code: (name, itemsize) for name, (code, itemsize) in DTYPES.items()}
# The limit of the safetensors package.
_MAX_HEADER = 100_000_000
_MAX_DIMENSIONS = 64

MAX_ELEMENTS = 1 << 58
"""A limit above the size of any real tensor; files with larger sizes are rejected."""


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor and its name in the file."""

    name: str
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements in the file."""
        return self.tensor.numel() * self.tensor.element_size()

    def copy(self) -> Block:
        """Return a block with a copy of the values in host memory."""
        return Block(self.name, self.tensor.detach().to("cpu", copy=True))


def make_block(name: str, tensor: torch.Tensor) -> Block:
    """Return the block of `tensor`; raise if it cannot be stored."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:
        raise CheckpointError(f"{name}: cannot store a tensor of layout {tensor.layout}: store tensor.to_dense()")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{name}: cannot store a tensor on the meta device: it has no values")
    if dtype_name(tensor) not in DTYPES:
        raise CheckpointError(f"{name}: cannot store a tensor of {tensor.dtype} (accepted: {', '.join(DTYPES)})")
    return Block(name, tensor.detach())


def stream(blocks: Sequence[Block]) -> Iterator[memoryview | bytes]:
    """Yield the content of a file with `blocks`, piece by piece."""
    # Largest element size first, so that every tensor starts at a multiple of its element size.
    ordered = sorted(blocks, key=lambda block: -block.tensor.element_size())
    yield _header(ordered)
    for block in ordered:
        try:
            yield from _pieces(block.tensor)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise CheckpointError(f"{block.name}: cannot read the values of a {type(block.tensor).__name__}") from error


def stream_size(blocks: Sequence[Block]) -> int:
    """Return the size of a file with `blocks`."""
    return len(_header(blocks)) + sum(block.nbytes for block in blocks)


def read_tensors(file: BinaryIO, size: int, where: str, digest: Digest) -> dict[str, torch.Tensor]:
    """Read a whole safetensors file into tensors that own their memory.

    `size` is the size of the file, which limits the sizes in its header; `digest` receives every byte, in order.

    Raises:
        CheckpointError: The file violates the format.
    """
    import torch

    tensors = {}
    for name, dtype, shape, nbytes in _read_header(file, size, where, digest)[1]:
        # The header was compared with the size of the file, so a small file cannot cause a huge allocation.
        memory = torch.empty(nbytes, dtype=torch.uint8)
        _fill(_bytes_of(memory), file, where, digest)
        # Torch's operations assume that a bool is 0 or 1.
        if dtype == "bool" and bool((memory > 1).any()):
            raise CheckpointError(f"{where}: tensor {name!r} contains bytes that are neither true nor false")
        tensors[name] = memory.view(getattr(torch, dtype)).reshape(shape)
    return tensors


class TensorFile:
    """A safetensors file whose tensors are read in parts; its size limits the sizes in its header.

    Raises:
        CheckpointError: The header violates the format.
    """

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self._file = file
        self._where = where
        self._places: dict[str, tuple[str, list[int], int]] = {}
        begin, layout = _read_header(file, size, where, Digest())
        for name, dtype, shape, nbytes in layout:
            self._places[name] = dtype, shape, begin
            begin += nbytes

    def shape(self, name: str) -> tuple[str, list[int]] | None:
        """Return dtype and shape of a tensor, or None if it is not in the file."""
        place = self._places.get(name)
        return place and place[:2]

    def rows(self, name: str, begin: int, number: int) -> torch.Tensor:
        """Return `number` rows of a tensor with at least one dimension."""
        import torch

        dtype, (_, *shape), offset = self._places[name]
        row_bytes = math.prod(shape) * DTYPES[dtype][1]
        memory = torch.empty(number * row_bytes, dtype=torch.uint8)
        self._file.seek(offset + begin * row_bytes)
        _fill(_bytes_of(memory), self._file, self._where, Digest())
        return memory.view(getattr(torch, dtype)).reshape([number, *shape])


def _read_header(
    file: BinaryIO, size: int, where: str, digest: Digest
) -> tuple[int, list[tuple[str, str, list[int], int]]]:
    """Return the position of the first tensor, and name, dtype, shape and bytes of all tensors in their order."""
    prefix = file.read(8)
    digest.update(prefix)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
        raise CheckpointError(f"{where}: the header is longer than the file or than {_MAX_HEADER:,} bytes")
    raw = file.read(length)
    digest.update(raw)
    return 8 + length, _layout(parse_json(raw, where), size - 8 - length, where)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype of a tensor as a key of `DTYPES`."""
    return str(tensor.dtype).removeprefix("torch.")


def _header(blocks: Sequence[Block]) -> bytes:
    """Return the first bytes of a safetensors file: the length of the header, and the header."""
    header: dict[str, Any] = {}
    end = 0
    for block in blocks:
        begin, end = end, end + block.nbytes
        header[block.name] = {
            "dtype": DTYPES[dtype_name(block.tensor)][0],
            "shape": list(block.tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padding, so that the first tensor starts at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces of at most `CHUNK`."""
    import torch

    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    if tensor.numel() == 0:
        return
    # Other large tensors are copied to plain host memory in pieces, so that no whole copy exists.
    if (tensor.device.type == "cpu" and _is_plain(tensor)) or tensor.numel() * tensor.element_size() <= CHUNK:
        plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        data = _bytes_of(plain.reshape(-1).view(torch.uint8))
        for begin in range(0, len(data), CHUNK):
            yield data[begin : begin + CHUNK]
    elif row_bytes > CHUNK:
        for row in tensor:
            yield from _pieces(row)
    else:
        height = CHUNK // row_bytes
        for begin in range(0, len(tensor), height):
            yield from _pieces(tensor[begin : begin + height])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # It shares the memory of the tensor.
    return memoryview(cast("bytearray", tensor.numpy()))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _layout(header: Any, size: int, where: str) -> list[tuple[str, str, list[int], int]]:
    """Return name, dtype, shape and bytes of the tensors in a header, in file order; raise if it is inconsistent."""
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: the header is not a JSON object")
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)], **rest} if (
                code in _TORCH_NAMES
                and not rest
                and len(shape) <= _MAX_DIMENSIONS
                and all(type(length) is int and length >= 0 for length in shape)
                # Count a zero as one: otherwise a product of 0 would accept absurd lengths.
                and math.prod(length or 1 for length in shape) < MAX_ELEMENTS
                and end - begin == math.prod(shape) * _TORCH_NAMES[code][1]
            ):
                found.append((begin, end, name, _TORCH_NAMES[code][0], shape))
            case _:
                raise CheckpointError(f"{where}: the header describes tensor {name!r} in an invalid form")
    position = 0
    found.sort(key=lambda item: item[:2])
    for begin, end, name, _, _ in found:
        # No gaps and no overlaps: every byte of the file belongs to one tensor.
        if begin != position:
            raise CheckpointError(f"{where}: tensor {name!r} does not start where the previous one ends")
        position = end
    if position != size:
        raise CheckpointError(f"{where}: the header describes {position:,} bytes, but the file has {size:,}")
    return [(name, dtype, shape, end - begin) for begin, end, name, dtype, shape in found]


def _fill(memory: memoryview, file: BinaryIO, where: str, digest: Digest) -> None:
    """Read a file until a memory is full; `digest` receives every byte."""
    while memory:
        # An unbuffered file may read less than requested.
        count = file.readinto(memory[:CHUNK])  # type: ignore[attr-defined]  # BinaryIO lacks what every file has
        if not count:
            raise CheckpointError(f"{where}: the file ends too early")
        digest.update(memory[:count])
        memory = memory[count:]
