"""Conversion of nested tensors and plain values to Flower's records and back, without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from dovetail.checkpoint.encoding import decode_text, encode
from dovetail.checkpoint.tensors import DTYPES
from dovetail.errors import DataError

# The names of the two records: the structure as text, and the tensors that it refers to.
_TEXT, _TENSORS = "dovetail", "dovetail.tensors"
# The format of arrays: raw bytes, because numpy's format has no bfloat16.
_RAW = "torch.raw"


def to_records(content: Mapping[str, Any], *, under: str = "") -> RecordDict:
    """Return content as records.

    Equal tensors become equal records, so Flower transfers the weights of a round once for all nodes.

    Args:
        content: Tensors and plain values, nested.
        under: The prefix of the names of the records.

    Raises:
        CheckpointError: A value is neither a tensor nor plain; the message has its place and type.

    Example:
        >>> records = to_records({"weights": {"w": torch.ones(2)}, "seed": 2**70, "cohort": (1, 2)})
        >>> from_records(records)
        {'weights': {'w': tensor([1., 1.])}, 'seed': 1180591620717411303424, 'cohort': (1, 2)}
    """
    encoded = encode(content)
    arrays = {block.name: _array(block.tensor) for block in encoded.blocks}
    return RecordDict({under + _TEXT: ConfigRecord({"text": encoded.text}), under + _TENSORS: ArrayRecord(arrays)})


def from_records(records: RecordDict, *, under: str = "") -> dict[str, Any]:
    """Return the content from which `to_records` made the records.

    Raises:
        DataError: A record is missing, or a tensor has another size than its type and shape need.
        CheckpointError: The text was not written by `to_records`.
    """
    try:
        text, arrays = records.config_records[under + _TEXT]["text"], records.array_records[under + _TENSORS]
    except KeyError as error:
        raise DataError(f"a message without the record {error.args[0]!r}: it was not written by Dovetail") from None
    if not isinstance(text, bytes):
        raise DataError(f"a message whose text is of type {type(text).__name__}: it was not written by Dovetail")
    tensors = {name: _tensor(name, array) for name, array in arrays.items()}
    content: dict[str, Any] = decode_text(text, "message", tensors, "cpu")
    return content


def _array(tensor: Tensor) -> Array:
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _RAW, data)


def _tensor(name: str, array: Array) -> Tensor:
    if array.stype != _RAW or array.dtype not in DTYPES or any(length < 0 for length in array.shape):
        raise DataError(f"{name}: an array of {array.dtype!r} and shape {array.shape}, written as {array.stype!r}")
    # Before memory is allocated: a short message must not claim a huge tensor.
    if len(array.data) != prod(array.shape) * DTYPES[array.dtype][1]:
        raise DataError(f"{name}: {len(array.data)} bytes do not make a {array.dtype} of shape {array.shape}")
    # In memory of torch, because some kernels round differently with another alignment.
    memory = torch.empty(len(array.data), dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(array.data, dtype=np.uint8)
    return memory.view(getattr(torch, array.dtype)).reshape(array.shape)
