"""Whether two nested values are the same, and if not, where they differ first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def assert_same(one: Any, other: Any, what: str) -> None:
    """Fail with the first difference between two nested values, if there is one."""
    found = difference(one, other, what)
    assert found is None, found


def difference(one: Any, other: Any, what: str) -> str | None:
    """Return a sentence about the first difference between two nested values, or None if they are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        return None if is_same else f"{what}: {one} is not {other}"
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            return f"{what}: the keys {list(one)} are not {list(other)}"
        pairs = [(f"{what}, {key!r}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"{what}: {len(one)} values are not {len(other)}"
        pairs = [(f"{what}, {place}", *pair) for place, pair in enumerate(zip(one, other, strict=True))]
    else:
        is_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
        return None if is_nan or one == other else f"{what}: {one!r} is not {other!r}"
    return next((found for where, a, b in pairs if (found := difference(a, b, where))), None)
