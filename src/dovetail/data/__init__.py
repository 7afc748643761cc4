"""Data loaders, batches, and datasets that need no download."""

from __future__ import annotations

from dovetail.data.batches import batch_length, concat, split_batch, to_device
from dovetail.data.datasets import LeafSynthetic, digits, fashion_mnist
from dovetail.data.idx import read_idx
from dovetail.data.loader import DataLoader, iterate_from
from dovetail.data.sharing import Share, is_shared_already, shared
from dovetail.data.sources import SamplerSource, as_loader, num_batches

__all__ = [
    "DataLoader",
    "LeafSynthetic",
    "SamplerSource",
    "Share",
    "as_loader",
    "batch_length",
    "concat",
    "digits",
    "fashion_mnist",
    "is_shared_already",
    "iterate_from",
    "num_batches",
    "read_idx",
    "shared",
    "split_batch",
    "to_device",
]
