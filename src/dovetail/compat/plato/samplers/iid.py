"""plato's `samplers.iid`: as many samples to each client, drawn at random."""

from __future__ import annotations

from typing import ClassVar

from dovetail.compat.plato.samplers.base import PartitionSampler

__all__ = ["Sampler"]


class Sampler(PartitionSampler):
    """The samples of one client: as many samples to each client, drawn at random."""

    partition: ClassVar[str] = "iid"
