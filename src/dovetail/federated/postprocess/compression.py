"""Lossless compression of updates with zstd."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dovetail.errors import DataError, expect
from dovetail.extras import require
from dovetail.federated.messages import Weights
from dovetail.federated.postprocess.base import Codec

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_HEADER_BYTES = 8


@dataclass(frozen=True)
class Zstd(Codec):
    """Compresses all tensors into one byte string, without loss. It must be the last step of a chain.

    Args:
        level: The compression level, from 1 (fast) to 22 (small).
        max_bytes: The largest accepted size after decompression.

    Example:
        >>> codec = Zstd()
        >>> packed = codec.pack({"w": torch.zeros(10_000)}, torch.Generator())
        >>> packed["zstd"].nbytes < 100, torch.equal(codec.unpack(packed)["w"], torch.zeros(10_000))
        (True, True)
    """

    level: int = 3
    max_bytes: int = 2**34

    def __post_init__(self) -> None:
        require("zstandard", "compression")
        expect(1 <= self.level <= 22, "level", "a whole number from 1 to 22", self.level)
        expect(self.max_bytes >= 1, "max_bytes", "a whole number of at least 1", self.max_bytes)

    def pack(self, weights: Weights, generator: torch.Generator) -> dict[str, Tensor]:
        entries = [
            [name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in weights.items()
        ]
        header = json.dumps(entries).encode()
        content = b"".join(_to_bytes(value) for value in weights.values())
        blob = len(header).to_bytes(_HEADER_BYTES, "little") + header + content
        packed = require("zstandard", "compression").ZstdCompressor(level=self.level).compress(blob)
        return {"zstd": torch.frombuffer(bytearray(packed), dtype=torch.uint8)}

    def unpack(self, packed: Weights) -> dict[str, Tensor]:
        zstandard = require("zstandard", "compression")
        try:
            frame = packed["zstd"].numpy(force=True).tobytes()
            # A few bytes can claim to decompress to terabytes (memory exhaustion). A frame without a size returns -1.
            size = zstandard.frame_content_size(frame)
            if not 0 <= size <= self.max_bytes:
                raise DataError(f"expected at most {self.max_bytes} bytes, got {size}")
            blob = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise DataError(f"no zstd frame: {error}") from error
        begin = _HEADER_BYTES + int.from_bytes(blob[:_HEADER_BYTES], "little")
        weights = {}
        for name, dtype, shape in json.loads(blob[_HEADER_BYTES:begin]):
            weights[name] = _from_bytes(blob, begin, _DTYPES[dtype], shape)
            begin += weights[name].nbytes
        return weights


def _to_bytes(value: Tensor) -> bytes:
    # The first bytes of all numbers, then their second bytes and so on: signs and exponents side by side compress,
    # which they do not between mantissas.
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    rows = flat.reshape(value.numel(), value.element_size())
    return rows.T.numpy().tobytes()


def _from_bytes(blob: bytes, begin: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    columns = torch.frombuffer(bytearray(blob[begin : begin + count * dtype.itemsize]), dtype=torch.uint8)
    return columns.reshape(dtype.itemsize, count).T.flatten().view(dtype).reshape(shape)
