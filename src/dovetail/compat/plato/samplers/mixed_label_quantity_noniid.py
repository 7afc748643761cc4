"""plato's `samplers.mixed_label_quantity_noniid`: common labels and a number of others for each client."""

from __future__ import annotations

from typing import ClassVar

from dovetail.compat.plato.samplers.base import PartitionSampler

__all__ = ["Sampler"]


class Sampler(PartitionSampler):
    """The samples of one client: common labels and a number of others for each client."""

    partition: ClassVar[str] = "mixed_label_quantity_noniid"
