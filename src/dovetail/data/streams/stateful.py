"""Stream of the batches of a loader that has a `state_dict`, but no method to divide it."""

from __future__ import annotations

import copy
from typing import Any

import torch

from dovetail.data.streams.sharded import OpenShard, ShardedStream


class StatefulLoaderStream(ShardedStream):
    """Batches of a user's loader. Every process reads all of them, and returns its part.

    Args:
        loader: A loader with `state_dict` and `load_state_dict`.
    """

    note = "a loader with state_dict but without split is read completely by each of several processes"

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._loader = loader

    def shard_order(self, epoch: int) -> list[int]:
        """Return the number of the only shard."""
        return [0]

    def open_shard(self, shard: int, epoch: int, state: Any) -> OpenShard:
        """Return the batches from the loader's own state on."""
        if state is None:
            batches = iter(self._loader)
        else:
            # An uninterrupted run draws no numbers in the middle of an epoch.
            with torch.random.fork_rng(devices=[]):
                self._loader.load_state_dict(copy.deepcopy(state))
                batches = iter(self._loader)
        return OpenShard(batches, lambda: copy.deepcopy(self._loader.state_dict()))
