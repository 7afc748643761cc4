"""Layout of gradients in flat tensors, which several processes sum in few messages."""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail.distributed import Group


class GradientLayout:
    """The positions of an optimizer's gradients in the few flat tensors that are summed.

    Optimized for the step of a small model, in which every Python call counts: `map` and `operator` make none.
    """

    def __init__(self, optimizer: Optimizer, bucket_size: int, num_extras: int = 6) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.num_trained = sum(map(_REQUIRES_GRAD, self.parameters))
        # The weight of all processes in the last average.
        self.weight = 0.0
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        buckets: list[list[Tensor]] = []
        for parameters in kinds.values():
            room = 0
            for parameter in parameters:
                if room < parameter.nbytes:
                    buckets.append([])
                    room = bucket_size
                buckets[-1].append(parameter)
                room -= parameter.nbytes
        self.buckets = [_Bucket(parameters, num_extras) for parameters in buckets]

    @property
    def is_whole(self) -> bool:
        """True if no parameter was frozen, unfrozen or added since the layout was built."""
        groups = self.optimizer.param_groups
        return sum(map(len, map(_PARAMS, groups))) == len(self.parameters) and self.num_trained == sum(
            map(_REQUIRES_GRAD, self.parameters)
        )

    def average(self, group: Group, weight: Any, extras: list[float]) -> list[float]:
        """Replace every gradient by the mean over all processes, and return the sums of `extras`."""
        sums = []
        for bucket in self.buckets:
            gradients, has = list(map(_GRAD, bucket.parameters)), bucket.has_all
            if any(map(is_, gradients, repeat(None))) or any(map(_IS_SPARSE, gradients)):
                has = [float(gradient is not None) for gradient in gradients]
                gradients = [_dense(gradient, part) for gradient, part in zip(gradients, bucket.parts, strict=True)]
            if not isinstance(weight, Tensor) and weight == 0:
                # Not multiplied by zero: a gradient of an idle process may be infinite.
                bucket.flat.zero_()
            elif bucket.is_exact:
                for gradient, part in zip(gradients, bucket.parts, strict=True):
                    torch.mul(gradient, weight, out=part)
            else:
                for gradient, part in zip(gradients, bucket.parts, strict=True):
                    part.copy_(gradient).mul_(weight)
            bucket.tail.copy_(torch.tensor([*has, *extras, 0.0], dtype=bucket.tail.dtype))
            bucket.tail[-1] = weight
            sums += bucket.sums
        if not sums:
            summed = torch.tensor(extras, dtype=torch.float64)
            group.sum(summed)
            return cast("list[float]", summed.tolist())
        group.sum(*sums)
        numbers: list[float] = []
        for bucket in self.buckets:
            *numbers, self.weight = bucket.tail.tolist()
            bucket.gradients.div_(self.weight or 1.0)
            for parameter, part, count in zip(bucket.parameters, bucket.parts, numbers, strict=False):
                # A parameter that no process used has no gradient, as in a single process.
                parameter.grad = (part if bucket.is_exact else part.to(parameter.dtype)) if count else None
            numbers = numbers[len(bucket.parameters) :]
        return numbers


class _Bucket:
    """Gradients of some parameters in one flat tensor, followed by the numbers that are sent with them.

    Afterwards the gradients of the parameters are views of this tensor, which the next average overwrites, as with
    torch's `gradient_as_bucket_view`.
    """

    def __init__(self, parameters: list[Tensor], num_extras: int) -> None:
        first = parameters[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        sizes = [parameter.numel() for parameter in parameters]
        num_numbers = len(parameters) + num_extras + 1
        self.parameters = parameters
        # Sums in half precision would lose too much.
        self.is_exact = dtype == first.dtype
        self.has_all = [1.0] * len(parameters)
        if first.device.type == "cpu":
            self.flat = torch.empty(sum(sizes) + num_numbers, dtype=dtype)
            self.gradients, self.tail = torch.split(self.flat, [sum(sizes), num_numbers])
            self.sums = [self.flat]
        else:
            # The host needs these numbers: as a separate tensor they do not wait for the device.
            self.flat = self.gradients = torch.empty(sum(sizes), dtype=dtype, device=first.device)
            self.tail = torch.empty(num_numbers, dtype=dtype)
            self.sums = [self.flat, self.tail]
        parts = torch.split(self.gradients, sizes)
        self.parts = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def _dense(gradient: Tensor | None, part: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(part)
    return gradient.to_dense() if gradient.is_sparse else gradient


_GRAD, _REQUIRES_GRAD, _IS_SPARSE = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("is_sparse")
_PARAMS = itemgetter("params")
