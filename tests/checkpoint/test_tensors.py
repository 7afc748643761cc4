"""Streamed safetensors files equal the files of the `safetensors` package, and malformed ones are rejected."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.checkpoint import load_model_file, save
from dovetail.checkpoint.files import Digest
from dovetail.checkpoint.tensors import make_block, read_tensors, stream, stream_size
from dovetail.errors import CheckpointError


def test_the_safetensors_package_reads_our_files(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3), "a": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.tensor(True)}
    path = save(tmp_path / "checkpoint", tensors)
    loaded = load_file(path / "tensors.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_files_of_the_safetensors_package_can_be_read(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3), "a": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.tensor(True)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_the_file_size_is_computed_before_writing() -> None:
    blocks = [make_block("a", torch.ones(3)), make_block("b", torch.ones(2, 2).T)]
    assert stream_size(blocks) == len(b"".join(stream(blocks)))


def test_a_large_tensor_is_never_copied_as_a_whole() -> None:
    large = torch.zeros(4_000_000).reshape(2000, 2000).T
    assert max(len(piece) for piece in stream([make_block("large", large)])) <= 1 << 20


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "header is longer"),
        (b"\x01\x00", "header is longer"),
        (_file({}, length=1 << 62), "header is longer"),
        (_file(b"[]"), "not a JSON object"),
        (_file(b"{"), "not valid JSON"),
        (_file(b"\xff\xfe"), "not valid JSON"),
        (_file(b"[" * 200_000), "nested too deeply"),
        (_file(b'{"a": ' + b"9" * 5000 + b"}"), "a number of 5000 digits"),
        (_file(b'{"a": NaN}'), "the constant NaN"),
        (_file(b'{"a": {}, "a": {}}'), "a key occurs twice"),
        (_file({"a": None}), "tensor 'a' in an invalid form"),
        (_file({"a": _entry("os.system")}, bytes(4)), "tensor 'a' in an invalid form"),
        (_file({"a": _entry(shape=(1 << 62,))}, bytes(4)), "tensor 'a' in an invalid form"),
        (_file({"a": _entry(shape=(-1,), offsets=(4, 0))}, bytes(4)), "tensor 'a' in an invalid form"),
        (_file({"a": _entry(shape=(0, 1 << 62), offsets=(0, 0))}), "tensor 'a' in an invalid form"),
        (_file({"a": _entry(shape=(1,) * 65)}, bytes(4)), "tensor 'a' in an invalid form"),
        (_file({"a": _entry(shape=(True,))}, bytes(4)), "tensor 'a' in an invalid form"),
        (_file({"a": _entry(extra=1)}, bytes(4)), "tensor 'a' in an invalid form"),
        (_file({"a": _entry(offsets=(4, 8))}, bytes(8)), "does not start where"),
        (_file({"a": _entry(), "b": _entry()}, bytes(4)), "does not start where"),
        (_file({"a": _entry()}, bytes(5)), "describes 4 bytes, but the file has 5"),
        (_file({"a": _entry()}, bytes(3)), "describes 4 bytes, but the file has 3"),
        (_file({"a": _entry("BOOL", (1,), (0, 1))}, b"\x02"), "neither true nor false"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_headers_are_rejected(content: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=f"^the file: .*{sentence}"):
        read_tensors(io.BytesIO(content), len(content), "the file", Digest())
