"""Streams of samples that can be read by index, in an order that is drawn for every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class IndexedStream:
    """Samples by index. A position is one number, so resuming reads no sample again.

    Args:
        read: Returns the sample of an index.
        order: Returns the indices of an epoch, in order.

    Example:
        >>> stream = IndexedStream("abcde".__getitem__, lambda epoch: [4, 3, 2, 1, 0])
        >>> list(stream.split(0, 2)), list(stream.split(1, 2))
        (['e', 'c', 'a'], ['d', 'b'])
    """

    def __init__(self, read: Callable[[int], Any], order: Callable[[int], Sequence[int]]) -> None:
        self._read = read
        self._order = order
        self._epoch, self._following, self._step = 0, 0, 1
        # The epoch and the indices that were drawn last. Parts of one process share them.
        self._drawn: dict[int, Sequence[int]] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is read."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self._epoch not in self._drawn:
            self._drawn.clear()
            self._drawn[self._epoch] = self._order(self._epoch)
        indices = self._drawn[self._epoch]
        while self._following < len(indices):
            index, self._following = int(indices[self._following]), self._following + self._step
            yield self._read(index)

    def split(self, rank: int, world: int) -> IndexedStream:
        """Return every `world`-th sample of the rest, from sample `rank`."""
        part = type(self).__new__(type(self))
        vars(part).update(vars(self), _following=self._following + rank * self._step, _step=self._step * world)
        return part

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of the next sample, and the distance to the one after it."""
        return {"epoch": self._epoch, "following": self._following, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the part, at the position, that `state_dict` described."""
        self._epoch, self._following, self._step = state["epoch"], state["following"], state["step"]
