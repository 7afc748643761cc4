"""Data: loaders, what becomes of batches, datasets that need no download, and the data of federations."""

from __future__ import annotations

from dovetail.data.batches import batch_length, concat, split_batch, to_device
from dovetail.data.datasets import LeafSynthetic, digits, fashion_mnist
from dovetail.data.federated import (
    Datasource,
    GeneratedData,
    PartitionedData,
    datasource,
    datasources,
    labels_of,
    leaf_synthetic,
)
from dovetail.data.idx import read_idx
from dovetail.data.loader import DataLoader, iterate_from
from dovetail.data.partition import Partition, make_partition, partitions
from dovetail.data.sharing import Share, is_shared_already, shared
from dovetail.data.sources import SamplerSource, as_loader, num_batches

__all__ = [
    "DataLoader",
    "Datasource",
    "GeneratedData",
    "LeafSynthetic",
    "Partition",
    "PartitionedData",
    "SamplerSource",
    "Share",
    "as_loader",
    "batch_length",
    "concat",
    "datasource",
    "datasources",
    "digits",
    "fashion_mnist",
    "is_shared_already",
    "iterate_from",
    "labels_of",
    "leaf_synthetic",
    "make_partition",
    "num_batches",
    "partitions",
    "read_idx",
    "shared",
    "split_batch",
    "to_device",
]
