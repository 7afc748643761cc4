"""plato's `samplers.distribution_noniid`: sizes and labels by Dirichlet distributions."""

from __future__ import annotations

from typing import ClassVar

from dovetail.compat.plato.samplers.base import PartitionSampler

__all__ = ["Sampler"]


class Sampler(PartitionSampler):
    """The samples of one client: sizes and labels by Dirichlet distributions."""

    partition: ClassVar[str] = "distribution_noniid"
