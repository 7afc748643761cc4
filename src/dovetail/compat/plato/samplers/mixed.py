"""plato's `samplers.mixed`: some clients with all labels, and some by a Dirichlet distribution."""

from __future__ import annotations

from typing import ClassVar

from dovetail.compat.plato.samplers.base import PartitionSampler

__all__ = ["Sampler"]


class Sampler(PartitionSampler):
    """The samples of one client: some clients with all labels, and some by a Dirichlet distribution."""

    partition: ClassVar[str] = "mixed"
