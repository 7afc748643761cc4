"""Several data sets of one stage, by name: `fit(train, {"clean": a, "noisy": b})`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dovetail.data.sources import holds_samples
from dovetail.errors import DataError


def named_sets(data: Any) -> Mapping[str, Any] | None:
    """Return data sets by name; None if the data is a single set.

    The values decide: a mapping of loaders, datasets, frames, tuples or lists of batches holds several sets, and a
    mapping with tensors or arrays is one set with named columns.

    Raises:
        DataError: A mapping has values of both kinds, or a name that is not a text.

    Example:
        >>> import torch
        >>> list(named_sets({"clean": (torch.zeros(2), torch.zeros(2)), "noisy": [torch.zeros(2)]}))
        ['clean', 'noisy']
        >>> named_sets({"inputs": torch.zeros(2), "labels": torch.zeros(2)}) is None
        True
    """
    if not isinstance(data, Mapping) or not data:
        return None
    are_sets = [_is_set(value) for value in data.values()]
    if not any(are_sets):
        return None
    if not all(are_sets):
        kinds = ", ".join(f"{name!r}: {type(value).__name__}" for name, value in data.items())
        raise DataError(
            "data: expected several data sets by name, such as loaders, or tensors and arrays of one data set, got "
            f"both: {kinds}"
        )
    for name in data:
        if not isinstance(name, str) or not name:
            raise DataError(f"data: expected names of data sets, such as 'clean', got {name!r}")
    return data


def _is_set(value: Any) -> bool:
    """Return whether a value of a mapping is a data set, not a column."""
    if isinstance(value, list):
        # A list of numbers, texts or lists of them, such as token ids, is a column. Any other list holds batches.
        first = value
        while isinstance(first, list) and first:
            first = first[0]
        return not isinstance(first, (bool, int, float, str, bytes, np.generic))
    # A series of pandas or polars is a column; a frame, which has columns, is a set.
    is_series = hasattr(value, "to_numpy") and not hasattr(value, "columns")
    if isinstance(value, (Tensor, np.ndarray, str, bytes)) or is_series:
        return False
    return isinstance(value, Iterable) or holds_samples(value)
