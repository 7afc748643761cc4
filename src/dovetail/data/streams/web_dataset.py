"""Adapter of WebDataset's pipelines."""

from __future__ import annotations

import os
import random
from typing import Any

from dovetail.data.streams.protocol import UnsuitableStreamError
from dovetail.data.streams.sharded import OpenShard, ShardedStream
from dovetail.extras import require
from dovetail.runtime.seeds import derive_seed


class WebDatasetStream(ShardedStream):
    """Samples of a `webdataset` pipeline, shard by shard.

    The stages after the tar files run for each shard alone. Stages that shuffle are seeded by `WDS_SEED` (or 0), the
    epoch and the shard. The library has no position inside of a shard, so a shard that was started is read again.

    Args:
        pipeline: A `WebDataset` or a `DataPipeline` that starts with a list of shards.

    Raises:
        UnsuitableStreamError: The pipeline has a stage that does not act on one sample or one shard alone.
    """

    note = (
        "webdataset has no position inside of a shard: a resumed run reads the shards that were started again from "
        "their start, so that no sample is lost"
    )

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        shardlists = require("webdataset.shardlists", "streams")
        if pipeline.repetitions != 1:
            raise UnsuitableStreamError(
                "with_epoch and repeat: an epoch of a stream is one pass over all shards, so leave them out"
            )
        source, *stages = pipeline.pipeline
        if not isinstance(source, shardlists.SimpleShardList):
            raise UnsuitableStreamError(
                f"{type(source).__name__}: a pipeline of webdataset must start with a list of shards, such as "
                "WebDataset(urls, shardshuffle=100), so that every sample is read once in an epoch"
            )
        self._urls: list[str] = list(source.urls)
        self._is_shuffled = False
        self._stages: list[Any] = []
        for stage in stages:
            name = _name(stage)
            is_shuffle = name in _SHUFFLES
            if name in _LEFT_OUT:
                continue
            if is_shuffle and not self._stages:
                self._is_shuffled = bool(_buffer_size(stage))
            elif is_shuffle or name in _BY_SHARD:
                self._stages.append(stage)
            else:
                raise UnsuitableStreamError(
                    f"{name}: this stage of a webdataset pipeline cannot run for every shard alone; accepted are "
                    f"shuffle and {', '.join(sorted(it.strip('_') for it in _BY_SHARD))}"
                )

    def shard_order(self, epoch: int) -> list[int]:
        """Return all shards; in a new order in each epoch if the pipeline shuffles its shards."""
        order = list(range(len(self._urls)))
        if self._is_shuffled:
            random.Random(_seed(epoch)).shuffle(order)
        return order

    def open_shard(self, shard: int, epoch: int, state: Any) -> OpenShard:
        """Return the samples of a shard, from its start."""
        wds = require("webdataset", "streams")
        stages = []
        for number, stage in enumerate(self._stages):
            if _name(stage) in _SHUFFLES:
                size, first = _buffer_size(stage), _initial_size(stage)
                stage = wds.filters.shuffle(size, initial=first, rng=random.Random(_seed(epoch, shard, number)))
            stages.append(stage)
        return OpenShard(iter(wds.DataPipeline([[{"url": self._urls[shard]}]], *stages)))


_SHUFFLES = {"_shuffle", "detshuffle"}

# Stages that divide the shards, which the trainer does, or that reject a pipeline without samples, like an empty shard.
_LEFT_OUT = {"split_by_node", "split_by_worker", "single_node_only", "non_empty", "check_empty"}

# Functions of stages that act on one sample or one shard alone, and classes that open shards.
_BY_SHARD = {
    "StreamingOpen",
    "FileCache",
    "tarfile_samples",
    "tar_file_expander",
    "group_by_keys",
    "_batched",
    "_decode",
    "_extract_keys",
    "_map",
    "_map_dict",
    "_map_tuple",
    "_rename",
    "_rename_keys",
    "_select",
    "_to_tuple",
    "_unbatched",
    "_xdecode",
}


def _name(stage: Any) -> str:
    """Return the name of the function that a stage applies, or of its class."""
    return str(getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__))


def _seed(*parts: int) -> int:
    return derive_seed(os.environ.get("WDS_SEED", "0"), "webdataset", *parts)


def _buffer_size(stage: Any) -> int:
    size = getattr(stage, "bufsize", None)
    if size is None:
        size = stage.args[0] if stage.args else stage.kw.get("bufsize", 1000)
    return int(size)


def _initial_size(stage: Any) -> int:
    first = getattr(stage, "initial", None)
    if first is None:
        first = stage.args[1] if len(stage.args) > 1 else stage.kw.get("initial", 100)
    return int(first)
