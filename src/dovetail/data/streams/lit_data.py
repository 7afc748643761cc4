"""Adapter of litData's streaming datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from dovetail.data.streams.indexed import IndexedStream
from dovetail.extras import require


class LitDataStream(IndexedStream):
    """Samples of a `litdata.StreamingDataset`, in the order in which one process without workers reads them.

    Args:
        dataset: The dataset; its `shuffle` and `seed` determine the order of each epoch.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset.__getitem__, self._epoch_order)
        self._dataset = dataset
        self.note: str | None = None

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        env = require("litdata.utilities.env", "streams")
        dataset = self._dataset
        cache = dataset._create_cache(worker_env=env._WorkerEnv.detect())
        shuffler = dataset._create_shuffler(cache)
        # In several processes the library drops samples to give each process equally many.
        shuffler.drop_last = False
        # The library counts epochs from 1.
        epoch += 1
        chunks, intervals = shuffler.get_chunks_and_intervals_per_workers(env._DistributedEnv(1, 0, 1), 1, 1, epoch)
        num_chunks = len(cache.get_chunk_intervals())
        parts = [
            shuffler(np.arange(interval[1], interval[2]), num_chunks, epoch, int(chunk))
            for chunk, interval in zip(chunks[0], intervals[0], strict=True)
        ]
        # An array is no `Sequence` to mypy, but is indexed like one.
        order: Any = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
        return cast("Sequence[int]", order)
