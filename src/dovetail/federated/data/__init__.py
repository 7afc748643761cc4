"""Data of a federation: datasources and partitions of a dataset over clients."""

from __future__ import annotations

from dovetail.federated.data.partition import Partition, make_partition, partitions
from dovetail.federated.data.sources import (
    Datasource,
    GeneratedData,
    PartitionedData,
    datasource,
    datasources,
    labels_of,
    leaf_synthetic,
)

__all__ = [
    "Datasource",
    "GeneratedData",
    "Partition",
    "PartitionedData",
    "datasource",
    "datasources",
    "labels_of",
    "leaf_synthetic",
    "make_partition",
    "partitions",
]
