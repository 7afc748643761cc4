"""Quantization of updates: fewer bits per number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from dovetail.errors import DataError, expect
from dovetail.federated.postprocess.base import TensorCodec


@dataclass(frozen=True)
class Quantization(TensorCodec):
    """Encodes every tensor as whole numbers between its smallest and its largest value.

    Args:
        bits: The bits per number: 8 or 4.
        stochastic: Round up or down by chance, so that the mean over clients and rounds is right; else to the nearest.

    Example:
        >>> codec = Quantization(bits=4)
        >>> packed = codec.pack({"w": torch.tensor([-1.0, 0.0, 0.5, 2.0])}, torch.Generator().manual_seed(0))
        >>> packed["w/levels"], packed["w/range"]
        (tensor([ 80, 247], dtype=torch.uint8), tensor([-1.,  2.]))
        >>> codec.unpack(packed)
        {'w': tensor([-1.0000,  0.0000,  0.4000,  2.0000])}
    """

    bits: Literal[4, 8] = 8
    stochastic: bool = True

    def __post_init__(self) -> None:
        expect(self.bits in (4, 8), "bits", "4 or 8", self.bits)

    def split(self, tensor: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        low, high = tensor.aminmax()
        step = self._step(low, high)
        # A constant tensor has no steps. NaN stays NaN, in the range.
        exact = torch.where(step != 0, (tensor.to(step) - low) / step, 0.0)
        levels = _rounded(exact, generator if self.stochastic else None)
        levels = levels.clamp(0, 2**self.bits - 1).to(torch.uint8)
        parts = {"levels": levels, "range": torch.stack((low, high))}
        if self.bits == 4:
            flat = torch.nn.functional.pad(levels.flatten(), (0, levels.numel() % 2))
            # Two numbers per byte, the first one in the lower half.
            parts["levels"] = flat[::2] | flat[1::2] << 4
            parts["shape"] = torch.tensor(tensor.shape, dtype=torch.int64)
        return parts

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        levels = parts["levels"]
        low, high = parts["range"]
        if self.bits == 4:
            shape = parts["shape"].tolist()
            if levels.dim() != 1 or len(levels) != (prod(shape) + 1) // 2:
                raise DataError(f"{len(levels)} bytes do not make a tensor of {shape}")
            levels = torch.stack((levels & 15, levels >> 4), dim=1).flatten()[: prod(shape)].reshape(shape)
        exact: Tensor = low + levels * self._step(low, high)
        return exact.to(low.dtype)

    def _step(self, low: Tensor, high: Tensor) -> Tensor:
        exact = torch.promote_types(low.dtype, torch.float32)
        step: Tensor = (high.to(exact) - low.to(exact)) / (2**self.bits - 1)
        return step


@dataclass(frozen=True)
class QSGD(TensorCodec):
    """Encodes every number as a share of its tensor's norm, rounded at random (Alistarh et al., 2017).

    The mean over many roundings is the tensor itself. Most numbers of a large tensor become 0, which a `Zstd` after it
    makes small.

    Args:
        levels: The number s of steps into which the norm is divided, at most 127.

    Example:
        >>> codec = QSGD(levels=4)
        >>> packed = codec.pack({"w": torch.tensor([3.0, -4.0, 0.0])}, torch.Generator().manual_seed(1))
        >>> packed["w/levels"], packed["w/norm"]
        (tensor([ 3, -3,  0], dtype=torch.int8), tensor(5.))
        >>> codec.unpack(packed)
        {'w': tensor([ 3.7500, -3.7500,  0.0000])}
    """

    levels: int = 64

    def __post_init__(self) -> None:
        expect(1 <= self.levels <= 127, "levels", "a whole number from 1 to 127", self.levels)

    def split(self, tensor: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        norm = torch.linalg.vector_norm(exact)
        # Q_s(v_i) = ‖v‖ · sgn(v_i) · ξ_i, where ξ_i is |v_i| s / ‖v‖ rounded at random, divided by s.
        shares = torch.where(norm != 0, exact.abs() * (self.levels / norm), 0.0)
        levels = _rounded(shares, generator).clamp(max=self.levels) * exact.sign()
        # A tensor without elements has the type, and no bytes.
        return {"levels": levels.to(torch.int8), "norm": norm, "type": tensor.new_empty(0)}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        return (parts["levels"] * (parts["norm"] / self.levels)).to(parts["type"].dtype)


@dataclass(frozen=True)
class Bfloat16(TensorCodec):
    """Encodes every number in 16 bits; plato's `model_quantize`.

    Example:
        >>> codec = Bfloat16()
        >>> codec.unpack(codec.pack({"w": torch.tensor([1.0, 0.1])}, torch.Generator()))
        {'w': tensor([1.0000, 0.1001])}
    """

    def split(self, tensor: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        # As whole numbers of 16 bits: numpy, which some transports go through, has no such floats.
        return {"bfloat16": tensor.to(torch.bfloat16).view(torch.int16), "type": tensor.new_empty(0)}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["bfloat16"].view(torch.bfloat16).to(parts["type"].dtype)


def _rounded(exact: Tensor, generator: torch.Generator | None) -> Tensor:
    """Round to the nearest number, or at random with a generator."""
    if generator is None:
        return exact.round()
    # floor(x + u) with u uniform in [0, 1) rounds up with the probability of x's fraction, so its mean is x.
    dice = torch.rand(exact.shape, generator=generator, dtype=exact.dtype)
    return (exact + dice.to(exact.device)).floor()
