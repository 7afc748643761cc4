"""Reader of IDX files, the format of MNIST and similar datasets."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import DataError

# The code of an element type in the header, and NumPy's name. All numbers are big-endian.
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CHUNK = 1 << 20


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """Return the array in an IDX file. A file whose name ends in `.gz` is decompressed.

    Raises:
        DataError: The file is damaged, or not an IDX file.
    """
    path = Path(path)
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            return _read(file, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: the compression is damaged: {error}") from error


def _read(file: BinaryIO, path: Path) -> Tensor:
    """Return the array of an open IDX file: type and sizes from the header, then the elements."""
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES or not head[3]:
        raise DataError(f"{path}: expected an IDX file, which starts with 0, 0, a type and a number of dimensions")
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise DataError(f"{path}: ends inside its header")
    shape = [int(size) for size in np.frombuffer(sizes, dtype=">u4")]
    dtype = np.dtype(_TYPES[head[2]])
    expected = math.prod(shape) * dtype.itemsize
    # Read in chunks: a damaged header may state a size beyond the memory.
    content = bytearray()
    while len(content) <= expected and (chunk := file.read(min(_CHUNK, expected + 1 - len(content)))):
        content += chunk
    if len(content) != expected:
        found = f"{len(content)}" if len(content) < expected else "more"
        raise DataError(f"{path}: its header states {shape}, which are {expected} bytes, but there are {found}")
    array = np.frombuffer(content, dtype=dtype).reshape(shape)
    return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))
