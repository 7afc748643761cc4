"""Counts of items and tokens that may be tensors of an accelerator, without reading them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

# Tokens are sent in two parts, because large numbers are not exact in float32. The sums of quotients and remainders by
# this number are exact for up to 4,096 processes.
TOKEN_UNIT = 4096


def whole_number(count: Any) -> Any:
    """Return a count as an int, or as a tensor of integers if it is on an accelerator.

    Example:
        >>> import torch
        >>> whole_number(torch.tensor(3.0))
        3
    """
    is_on_device = isinstance(count, Tensor) and count.device.type != "cpu"
    return count.long() if is_on_device else int(count)


def join_on_device(high: Tensor, low: Tensor) -> Tensor:
    """Return the number of tokens from the sums of its two parts.

    Example:
        >>> import torch
        >>> join_on_device(torch.tensor(2.0), torch.tensor(5.0))
        tensor(8197)
    """
    return high.round().long() * TOKEN_UNIT + low.round().long()


def put(numbers: Tensor, values: Iterable[Any]) -> None:
    """Write numbers, or tensors of one number, into a tensor of an accelerator.

    Example:
        >>> import torch
        >>> numbers = torch.zeros(2)
        >>> put(numbers, [2, torch.tensor(3)])
        >>> numbers
        tensor([2., 3.])
    """
    for number, value in enumerate(values):
        # A copy from the host's memory would wait for the device; a Python number is an argument of a kernel.
        is_on_host = isinstance(value, Tensor) and value.device.type == "cpu"
        numbers[number] = value.item() if is_on_host else value
