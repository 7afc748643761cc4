from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from dovetail.data import read_idx
from dovetail.errors import DataError


def idx(kind: int, shape: tuple[int, ...], content: bytes) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def test_idx_bytes_are_read_in_c_order(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(idx(8, (2, 2, 3), bytes(range(12))))
    array = read_idx(path)
    assert array.dtype == torch.uint8
    assert array.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


@pytest.mark.parametrize(
    ("kind", "letter", "dtype", "values"),
    [
        (0x09, "b", torch.int8, [-1, 127]),
        (0x0B, "h", torch.int16, [-2, 300]),
        (0x0C, "i", torch.int32, [-3, 70_000]),
        (0x0D, "f", torch.float32, [0.5, -2.0]),
        (0x0E, "d", torch.float64, [0.1, 1e300]),
    ],
)
def test_every_idx_type_is_read_as_big_endian(
    kind: int, letter: str, dtype: torch.dtype, values: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "array"
    path.write_bytes(idx(kind, (2,), struct.pack(f">2{letter}", *values)))
    assert torch.equal(read_idx(path), torch.tensor(values, dtype=dtype))


def test_compressed_idx_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx(8, (3,), b"\x05\x00\x09")))
    assert read_idx(path).tolist() == [5, 0, 9]


def test_the_array_read_is_writable(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(idx(8, (1,), b"\x05"))
    assert read_idx(path).add_(1).tolist() == [6]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "expected an IDX file"),
        (b"\x80\x04\x95\x0a", "expected an IDX file"),
        (b"\0\0\x07\x01\0\0\0\0", "expected an IDX file"),
        (b"\0\0\x08\x00", "expected an IDX file"),
        (b"\0\0\x08\x02\0\0\0\1", "ends inside its header"),
        (idx(8, (3,), b"ab"), r"its header states \[3\], which are 3 bytes, but there are 2"),
        (idx(8, (3,), b"abcd"), r"its header states \[3\], which are 3 bytes, but there are more"),
        (idx(8, (2**32 - 1,) * 255, b"abcd"), "but there are 4$"),
    ],
)
def test_files_that_are_not_idx_are_rejected(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "array"
    path.write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        read_idx(path)


@pytest.mark.parametrize("cut", [5, 25, -1])
def test_damaged_compression_is_rejected(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "array.gz"
    path.write_bytes(gzip.compress(idx(8, (100,), bytes(range(100))))[:cut])
    with pytest.raises(DataError, match=r"array\.gz: the compression is damaged"):
        read_idx(path)


def test_an_uncompressed_file_with_a_gz_suffix_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "array.gz"
    path.write_bytes(idx(8, (1,), b"a"))
    with pytest.raises(DataError, match="the compression is damaged"):
        read_idx(path)
