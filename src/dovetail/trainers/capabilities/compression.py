"""Compression of the gradients that processes exchange: half precision, or PowerSGD with error feedback."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.errors import ConfigError


class Codec(ABC):
    """Compressed form of one bucket.

    Args:
        parts: Views of the bucket, one per parameter.
        flat: The bucket.
    """

    def __init__(self, parts: Sequence[Tensor], flat: Tensor) -> None:
        self.parts, self.flat = parts, flat

    @abstractmethod
    def encode(self, weight: Any) -> list[Tensor]:
        """Return the messages to sum first, from the weighted gradients in the bucket."""

    def second_messages(self) -> list[Tensor]:
        """Return the messages to sum when the first ones are summed."""
        return []

    @abstractmethod
    def decode(self, weight: Any, total: Any, counts: Sequence[float]) -> None:
        """Write the sum over all processes into the bucket.

        Args:
            weight: The weight of this process, a number or a tensor.
            total: The weight of all processes, a number or a tensor.
            counts: The number of processes that have a gradient, for each parameter.
        """

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors that stay in memory between the updates, besides the bucket."""

    def state(self) -> list[dict[str, Tensor]]:
        """Return the state of each parameter, empty if it has none."""
        return [{} for _ in self.parts]

    @abstractmethod
    def load(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Restore the states of the parameters; a state of another form is ignored."""


class Compression(ABC):
    """Form in which gradients are sent.

    Attributes:
        needs_unit: True if weighted gradients must be divided by about the weight of all processes to be in range.
        has_feedback: True if what an update omits is added to a later one.
    """

    needs_unit: ClassVar[bool] = False
    has_feedback: ClassVar[bool] = False

    @abstractmethod
    def codec(self, parts: Sequence[Tensor], flat: Tensor, unit: float, first: int) -> Codec:
        """Return the codec of one bucket, whose first parameter has a number among all parameters."""

    def applies(self, num_updates: int) -> bool:
        """Return whether the gradients of an update are compressed, given the number of updates before it."""
        return True

    def after_warm_up(self) -> Compression:
        """Return the same compression that applies from the first update."""
        return self


@dataclass(frozen=True)
class HalfPrecision(Compression):
    """Sends gradients in bfloat16 or float16, which halves the messages. The weights stay equal in all processes.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.

    Example:
        >>> HalfPrecision(torch.bfloat16)
        HalfPrecision(dtype=torch.bfloat16)
    """

    dtype: torch.dtype

    @property
    def needs_unit(self) -> bool:  # type: ignore[override]  # depends on the type
        """True for float16, whose largest number is 65504."""
        return self.dtype == torch.float16

    def codec(self, parts: Sequence[Tensor], flat: Tensor, unit: float, first: int) -> Codec:
        """Return the codec of one bucket, whose first parameter has a number among all parameters."""
        return _HalfCodec(parts, flat, self.dtype, unit)


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Sends matrices of gradients as products of two thin matrices, with error feedback (Vogels et al., 2019).

    Each process adds what an update omitted to its gradients of the next one. A checkpoint contains these errors, so
    its size grows by one gradient per process.

    Args:
        rank: The number of columns of the thin matrices. A larger rank sends more and omits less.
        warm_up: The number of updates at the start whose gradients are sent in full.

    Example:
        >>> PowerSGD(rank=2)
        PowerSGD(rank=2, warm_up=1000)
    """

    has_feedback: ClassVar[bool] = True

    rank: int = 4
    warm_up: int = 1000

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("warm_up", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"PowerSGD: {name}: expected a whole number that is at least {least}, got {value!r}")

    def codec(self, parts: Sequence[Tensor], flat: Tensor, unit: float, first: int) -> Codec:
        """Return the codec of one bucket, whose first parameter has a number among all parameters."""
        return _PowerCodec(parts, flat, self.rank, first)

    def applies(self, num_updates: int) -> bool:
        """Return whether the warm-up is over."""
        return num_updates >= self.warm_up

    def after_warm_up(self) -> Compression:
        """Return the same compression that applies from the first update."""
        return replace(self, warm_up=0)


_NAMES: dict[str, Compression] = {
    "bf16": HalfPrecision(torch.bfloat16),
    "fp16": HalfPrecision(torch.float16),
    "powersgd": PowerSGD(),
}


def as_compression(value: Any) -> Compression | None:
    """Return the compression of a name or an object; None means that gradients are sent in full.

    Raises:
        ConfigError: The value is neither a known name nor a compression.
    """
    if value is None or isinstance(value, Compression):
        return value
    if isinstance(value, str) and value in _NAMES:
        return _NAMES[value]
    raise ConfigError(
        f"compression: expected None, {', '.join(map(repr, _NAMES))} or PowerSGD(rank=…, warm_up=…), got {value!r}"
    )


def unit_of(total: float) -> float:
    """Return the power of two that is nearest to a total weight: a division by it is exact."""
    return 2.0 ** round(math.log2(total)) if total > 0 else 1.0


def mean_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of one of another number of processes: the mean error, so that no error is lost or doubled."""
    first, *others = states
    found: dict[str, Any] = {}
    for position, state in first.items():
        parameters = [dict(it) for it in state["parameters"]]
        for number, parameter in enumerate(parameters):
            if "error" in parameter:
                errors = [it[position]["parameters"][number]["error"] for it in others]
                parameter["error"] = torch.stack([parameter["error"], *errors]).mean(dim=0)
        found[position] = {**state, "parameters": parameters}
    return found


class _HalfCodec(Codec):
    """A bucket in half precision."""

    def __init__(self, parts: Sequence[Tensor], flat: Tensor, dtype: torch.dtype, unit: float) -> None:
        super().__init__(parts, flat)
        self._message = torch.empty_like(flat, dtype=dtype)
        self._unit = unit

    def encode(self, weight: Any) -> list[Tensor]:
        self._message.copy_(self.flat if self._unit == 1.0 else self.flat.div_(self._unit))
        return [self._message]

    def decode(self, weight: Any, total: Any, counts: Sequence[float]) -> None:
        self.flat.copy_(self._message)
        if self._unit != 1.0:
            self.flat.mul_(self._unit)

    def tensors(self) -> list[Tensor]:
        return [self._message]

    def load(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Do nothing: half precision has no state."""


class _Factors:
    """The two thin matrices of one parameter, and the error of this process."""

    def __init__(self, number: int, part: Tensor, rank: int, seed: int) -> None:
        self.number = number
        self.matrix = part.view(len(part), -1)
        rows, columns = self.matrix.shape
        self.rank = min(rank, rows, columns)
        self.error = torch.zeros_like(self.matrix)
        # The same start in all processes, on every device.
        start = torch.randn(columns, self.rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.right = start.to(part)
        self.left = self.new_right = self.right

    @staticmethod
    def pays(part: Tensor, rank: int) -> bool:
        """Return whether two thin matrices are less than half as large as the parameter."""
        if part.ndim < 2 or part.numel() == 0:
            return False
        rows, columns = len(part), part.numel() // len(part)
        return 2 * (rows + columns) * min(rank, rows, columns) < part.numel()


class _PowerCodec(Codec):
    """A bucket whose matrices are sent as products of two thin matrices, and whose other parameters are sent whole."""

    def __init__(self, parts: Sequence[Tensor], flat: Tensor, rank: int, first: int) -> None:
        super().__init__(parts, flat)
        self._factors = [
            _Factors(number, part, rank, seed=first + number)
            for number, part in enumerate(parts)
            if _Factors.pays(part, rank)
        ]
        chosen = {factors.number for factors in self._factors}
        self._others = [part for number, part in enumerate(parts) if number not in chosen]
        lefts = [len(factors.matrix) * factors.rank for factors in self._factors]
        rights = [factors.right.numel() for factors in self._factors]
        self._first = flat.new_empty(sum(lefts) + sum(part.numel() for part in self._others))
        self._second = flat.new_empty(sum(rights))
        pieces = torch.split(self._first, [*lefts, *(part.numel() for part in self._others)])
        self._sent_others = pieces[len(lefts) :]
        for factors, left, right in zip(self._factors, pieces, torch.split(self._second, rights), strict=False):
            factors.left = left.view(-1, factors.rank)
            factors.new_right = right.view(-1, factors.rank)

    def encode(self, weight: Any) -> list[Tensor]:
        for factors in self._factors:
            factors.matrix.add_(factors.error * weight)
            torch.mm(factors.matrix, torch.linalg.qr(factors.right).Q, out=factors.left)
        for part, sent in zip(self._others, self._sent_others, strict=True):
            sent.copy_(part.reshape(-1))
        return [self._first]

    def second_messages(self) -> list[Tensor]:
        for factors in self._factors:
            factors.left.copy_(torch.linalg.qr(factors.left).Q)
            torch.mm(factors.matrix.T, factors.left, out=factors.new_right)
        return [self._second] if self._factors else []

    def decode(self, weight: Any, total: Any, counts: Sequence[float]) -> None:
        for part, sent in zip(self._others, self._sent_others, strict=True):
            part.copy_(sent.view_as(part))
        for factors in self._factors:
            approximation = factors.left @ factors.new_right.T
            if counts[factors.number]:
                # Nothing is stored from an update without items, or with an infinite gradient, which would last
                # forever. Not as a condition of Python, which would wait for the device.
                is_stored = torch.isfinite(approximation).all() & (total != 0)
                error = factors.matrix / weight - approximation / total
                factors.right = torch.where(is_stored, factors.new_right, factors.right)
                factors.error = torch.where(is_stored & (weight != 0), error, factors.error)
            factors.matrix.copy_(approximation)

    def tensors(self) -> list[Tensor]:
        return [self._first, self._second, *(it for each in self._factors for it in (each.error, each.right))]

    def state(self) -> list[dict[str, Tensor]]:
        states = super().state()
        for factors in self._factors:
            states[factors.number] = {"error": factors.error, "right": factors.right}
        return states

    def load(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        for factors in self._factors:
            saved = states[factors.number]
            # Another rank, or another version of the model, starts with errors of zero.
            if saved and saved["error"].shape == factors.error.shape and saved["right"].shape == factors.right.shape:
                factors.error, factors.right = saved["error"].to(factors.error), saved["right"].to(factors.right)
