"""plato's `samplers.dirichlet`: labels by a Dirichlet distribution."""

from __future__ import annotations

from typing import ClassVar

from dovetail.compat.plato.samplers.base import PartitionSampler

__all__ = ["Sampler"]


class Sampler(PartitionSampler):
    """The samples of one client: labels by a Dirichlet distribution."""

    partition: ClassVar[str] = "noniid"
