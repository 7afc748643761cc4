"""Data loaders, batches, and datasets that need no download."""

from __future__ import annotations

from dovetail.data.batches import batch_length, concat, split_batch, to_device
from dovetail.data.datasets import LeafSynthetic, digits, fashion_mnist
from dovetail.data.folds import k_fold
from dovetail.data.idx import read_idx
from dovetail.data.loader import DataLoader, iterate_from
from dovetail.data.packing import PackedRows, pack
from dovetail.data.sharing import Share, is_shared_already, shared
from dovetail.data.sources import SamplerSource, as_loader, num_batches
from dovetail.data.streams import Stream, StreamLoader, as_stream

__all__ = [
    "DataLoader",
    "LeafSynthetic",
    "PackedRows",
    "SamplerSource",
    "Share",
    "Stream",
    "StreamLoader",
    "as_loader",
    "as_stream",
    "batch_length",
    "concat",
    "digits",
    "fashion_mnist",
    "is_shared_already",
    "iterate_from",
    "k_fold",
    "num_batches",
    "pack",
    "read_idx",
    "shared",
    "split_batch",
    "to_device",
]
