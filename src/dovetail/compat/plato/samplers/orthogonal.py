"""plato's `samplers.orthogonal`: groups of labels, each for some clients."""

from __future__ import annotations

from typing import ClassVar

from dovetail.compat.plato.samplers.base import PartitionSampler

__all__ = ["Sampler"]


class Sampler(PartitionSampler):
    """The samples of one client: groups of labels, each for some clients."""

    partition: ClassVar[str] = "orthogonal"
