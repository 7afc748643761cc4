"""Data: loaders, what becomes of batches, and datasets that need no download."""

from __future__ import annotations

from dovetail.data.batches import batch_length, concat, split_batch, to_device
from dovetail.data.datasets import digits
from dovetail.data.loader import DataLoader, iterate_from
from dovetail.data.sharing import Share, is_shared_already, shared
from dovetail.data.sources import SamplerSource, as_loader, num_batches

__all__ = [
    "DataLoader",
    "SamplerSource",
    "Share",
    "as_loader",
    "batch_length",
    "concat",
    "digits",
    "is_shared_already",
    "iterate_from",
    "num_batches",
    "shared",
    "split_batch",
    "to_device",
]
