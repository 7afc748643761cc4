"""Adapter of MosaicML's streaming datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.data.streams.indexed import IndexedStream
from dovetail.extras import require


class MosaicStream(IndexedStream):
    """Samples of a `streaming.StreamingDataset`, in the order that its shuffling algorithm draws for each epoch.

    Args:
        dataset: The dataset; its `shuffle`, `shuffle_algo` and `shuffle_seed` determine the order of each epoch, and
            the weights of its streams determine the samples.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset.__getitem__, self._epoch_order)
        self._dataset = dataset
        self.note: str | None = None

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        dataset = self._dataset
        units, samples = dataset.resample_streams(epoch)
        if not dataset.shuffle:
            order: Sequence[int] = samples
            return order
        nodes = dataset.num_canonical_nodes or (64 if dataset.shuffle_algo in ("py1s", "py2s") else 1)
        block_size = dataset.shuffle_block_size or max(4_000_000 // nodes, 1 << 18)
        # The library's own division among processes repeats samples if their number is not a multiple.
        draw = require("streaming.base.shuffle", "streams").get_shuffle
        shuffle = draw(dataset.shuffle_algo, units, nodes, dataset.shuffle_seed, epoch, block_size)
        shuffled: Sequence[int] = samples[shuffle]
        return shuffled
