"""Adapter of Hugging Face's iterable datasets."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

import numpy as np

from dovetail.data.streams.sharded import OpenShard, ShardedStream
from dovetail.errors import DataError


class HuggingFaceStream(ShardedStream):
    """Samples of a `datasets.IterableDataset`, shard by shard.

    A position in a shard is the library's own state. A shard that is read through a shuffle buffer, whose content that
    state does not hold, is read again from its start.

    Args:
        dataset: The dataset, as a whole.

    Raises:
        DataError: The dataset was divided by `split_dataset_by_node` before.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        if dataset._distributed is not None:
            raise DataError(
                "the dataset was divided by split_dataset_by_node: give the whole dataset, which the trainer divides "
                "among its processes and workers"
            )
        kinds = _kinds(dataset._ex_iterable)
        self._dataset = dataset
        # Other operations, such as `take` or `interleave_datasets`, give other samples if every shard is read alone.
        self._num_shards = dataset.num_shards if kinds <= _BY_SHARD else 1
        is_table = dataset._formatting is not None and dataset._formatting.is_table
        self.note = (
            None
            if kinds <= _SEEKABLE and not is_table
            else "a state of datasets does not hold the samples of a shuffle buffer or of tables in a batched map: a "
            "resumed run reads the shards that were started again from their start, so that no sample is lost"
        )

    def shard_order(self, epoch: int) -> list[int]:
        """Return all shards; after the first epoch in a new order, as the library does."""
        if not epoch:
            return list(range(self._num_shards))
        order: list[int] = np.random.default_rng(epoch).permutation(self._num_shards).tolist()
        return order

    def open_shard(self, shard: int, epoch: int, state: Any) -> OpenShard:
        """Return the samples of a shard, from the library's own state on."""
        part = self._dataset.shard(self._num_shards, shard) if self._num_shards > 1 else copy(self._dataset)
        part.set_epoch(epoch)
        part.load_state_dict(deepcopy(state))
        return OpenShard(iter(part), None if self.note is not None else lambda: deepcopy(part.state_dict()))


# Operations that act on every sample alone, or on samples of one shard.
_SEEKABLE = {
    "ExamplesIterable",
    "ShuffledDataSourcesExamplesIterable",
    "ArrowExamplesIterable",
    "ShuffledDataSourcesArrowExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "MappedExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
}
_CYCLE = "cycle over whole shards"
_BY_SHARD = _SEEKABLE | {"BufferShuffledExamplesIterable", _CYCLE}


def _kinds(examples: Any) -> set[str]:
    """Return the names of the library's classes that a dataset consists of."""
    sources = [examples.ex_iterable] if hasattr(examples, "ex_iterable") else getattr(examples, "ex_iterables", [])
    kinds = set[str]().union(*map(_kinds, sources))
    # `shuffle` reads several shards at once, and all of them completely.
    is_whole = getattr(examples, "stopping_strategy", None) == "all_exhausted_without_replacement"
    return kinds | {_CYCLE if is_whole else type(examples).__name__}
