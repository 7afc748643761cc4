"""plato's `samplers.label_quantity_noniid`: a number of labels for each client."""

from __future__ import annotations

from typing import ClassVar

from dovetail.compat.plato.samplers.base import PartitionSampler

__all__ = ["Sampler"]


class Sampler(PartitionSampler):
    """The samples of one client: a number of labels for each client."""

    partition: ClassVar[str] = "label_quantity_noniid"
