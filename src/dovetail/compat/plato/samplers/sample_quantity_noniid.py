"""plato's `samplers.sample_quantity_noniid`: sizes by a Dirichlet distribution."""

from __future__ import annotations

from typing import ClassVar

from dovetail.compat.plato.samplers.base import PartitionSampler

__all__ = ["Sampler"]


class Sampler(PartitionSampler):
    """The samples of one client: sizes by a Dirichlet distribution."""

    partition: ClassVar[str] = "sample_quantity_noniid"
