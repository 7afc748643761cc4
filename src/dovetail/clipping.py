"""Gradient clipping, shared by the option, the strategies and the callback that clip."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from dovetail.distributed import is_part, own_part, whole
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["Clipping"]


@dataclass(frozen=True)
class Clipping:
    """A limit for the gradients of one optimizer, by their norm or by the magnitude of each element.

    Args:
        owner: The public name that the user wrote, for error messages.
        max_norm: The largest norm of all gradients together, or None.
        max_value: The largest magnitude of an element, or None. Exactly one of the two is given.
        norm_type: The norm that `max_norm` limits.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> Clipping("GradientClipping", max_norm=1.0).apply(torch.optim.SGD([weight]))
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """

    owner: str
    max_norm: float | None = None
    max_value: float | None = None
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if (self.max_norm is None) == (self.max_value is None):
            raise ConfigError(
                f"{self.owner}: expected exactly one positive limit, max_norm or max_value, "
                f"got max_norm={self.max_norm!r} and max_value={self.max_value!r}"
            )
        # `not … > 0` also rejects NaN.
        if not self.limit > 0:
            name = "max_norm" if self.max_value is None else "max_value"
            raise ConfigError(f"{self.owner}: {name}: expected a number above 0, got {self.limit!r}")
        if self.max_value is not None and self.norm_type != 2.0:
            raise ConfigError(
                f"{self.owner}: norm_type: expected with max_norm only, "
                f"got norm_type={self.norm_type!r} and max_value={self.max_value!r}"
            )

    @property
    def limit(self) -> float:
        """The limit that was given: `max_norm` or `max_value`."""
        found = self.max_norm if self.max_value is None else self.max_value
        assert found is not None
        return found

    def apply(self, optimizer: Optimizer) -> Tensor:
        """Clip the gradients of an optimizer and return their norm, or largest magnitude, before clipping."""
        # `map` and `chain` make no Python call; this function runs in every update.
        parameters = list(chain.from_iterable(map(_PARAMETERS, optimizer.param_groups)))
        # Again without a Python call.
        if not _PLAIN.issuperset(map(type, parameters)):
            divided = [it.grad for it in parameters if it.grad is not None and is_part(it.grad)]
            others = [it.grad for it in parameters if it.grad is not None and not is_part(it.grad)]
            if divided:
                return self._apply_to_parts(divided, others)
        if self.max_norm is not None:
            return clip_grad_norm_(parameters, self.max_norm, self.norm_type)
        # Before clipping, which changes the gradients in place.
        size = get_total_norm([it.grad for it in parameters if it.grad is not None], torch.inf)
        clip_grad_value_(parameters, self.limit)
        return size

    def _apply_to_parts(self, divided: list[Tensor], others: list[Tensor]) -> Tensor:
        """Clip gradients that are divided among processes and others, which every process has as a whole.

        No operation of torch accepts a list of both, and none returns the largest magnitude of an empty part.
        """
        norm_type = self.norm_type if self.max_value is None else torch.inf
        norm = _largest(divided) if norm_type == torch.inf else whole(get_total_norm(divided, norm_type))
        norms = torch.stack([norm, get_total_norm(others, norm_type).to(norm)]) if others else norm[None]
        size: Tensor = torch.linalg.vector_norm(norms, norm_type)
        with torch.no_grad():
            factor = None if self.max_norm is None else torch.clamp(self.max_norm / (size + 1e-6), max=1.0)
            # Element by element, so each process clips its own part.
            for gradient in map(own_part, divided + others):
                if factor is None:
                    gradient.clamp_(-self.limit, self.limit)
                else:
                    gradient.mul_(factor.to(gradient.device))
        return size


def _largest(divided: list[Tensor]) -> Tensor:
    """Return the largest magnitude of the parts of all processes. A collective call."""
    from torch.distributed.tensor import DTensor, Partial

    first: Any = divided[0]
    parts = [part for part in map(own_part, divided) if part.numel()]
    largest = get_total_norm(parts, torch.inf) if parts else own_part(first).new_zeros(())
    over_all = [Partial("max")] * first.device_mesh.ndim
    of_all: Tensor = DTensor.from_local(largest, first.device_mesh, over_all)
    return whole(of_all)


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_PARAMETERS = itemgetter("params")
