"""Streams of samples in shards, such as files, which are read from their start or from a position in the shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class OpenShard(NamedTuple):
    """A shard that is being read.

    Attributes:
        samples: The samples from the position on at which the shard was opened.
        state: Returns the state from which `open_shard` continues; None if a shard can only be read from its start.
    """

    samples: Iterator[Any]
    state: Callable[[], Any] | None = None


@dataclass(frozen=True)
class _Piece:
    """A part of a shard.

    Attributes:
        shard: The number of the shard.
        following: The number, in the shard, of the next sample of this part.
        step: The distance from one sample of this part to the next.
        read: The number of samples before the position that `state` describes.
        state: The state of the library's reader; None means the start of the shard.
    """

    shard: int
    following: int = 0
    step: int = 1
    read: int = 0
    state: Any = None

    def every(self, rank: int, world: int) -> _Piece:
        return replace(self, following=self.following + rank * self.step, step=self.step * world)


class ShardedStream(ABC):
    """Samples in shards. Whole shards are divided among the readers; the readers share only the shards that are left.

    Finished shards are never opened again.

    Example:
        >>> class Words(ShardedStream):
        ...     def shard_order(self, epoch):
        ...         return [0, 1, 2]
        ...
        ...     def open_shard(self, shard, epoch, state):
        ...         return OpenShard(iter(["ab", "cd", "ef"][shard]))
        >>> list(Words().split(0, 2)), list(Words().split(1, 2))
        (['a', 'b', 'e'], ['c', 'd', 'f'])
    """

    def __init__(self) -> None:
        self._epoch = 0
        # None means that the order of the epoch is not drawn yet.
        self._pieces: list[_Piece] | None = None
        self._open: OpenShard | None = None
        # Samples of the open shard that were read.
        self._num_read = 0

    @abstractmethod
    def shard_order(self, epoch: int) -> list[int]:
        """Return the numbers of all shards in the order of an epoch."""

    @abstractmethod
    def open_shard(self, shard: int, epoch: int, state: Any) -> OpenShard:
        """Return the samples of a shard; the same ones, in the same order, for the same shard and epoch.

        Args:
            shard: The number of the shard.
            epoch: The epoch.
            state: A result of `OpenShard.state`; None means the start.
        """

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is read."""
        self._epoch, self._pieces = epoch, None

    def __iter__(self) -> Iterator[Any]:
        pieces = self._pieces = self._left()
        while pieces:
            piece = pieces[0]
            opened = self._open = self.open_shard(piece.shard, self._epoch, piece.state)
            self._num_read = piece.read
            for sample in opened.samples:
                self._num_read += 1
                if self._num_read <= piece.following:
                    continue
                piece = pieces[0] = replace(piece, following=piece.following + piece.step)
                yield sample
            self._open = None
            del pieces[0]

    def split(self, rank: int, world: int) -> ShardedStream:
        """Return whole shards of the rest, and every `world`-th sample of the shards that cannot be divided."""
        pieces = self.state_dict()["pieces"]
        num_whole = len(pieces) // world * world
        mine = [_Piece(*piece) for piece in pieces[rank:num_whole:world]]
        part = type(self).__new__(type(self))
        vars(part).update(vars(self), _open=None)
        part._pieces = [*mine, *(_Piece(*piece).every(rank, world) for piece in pieces[num_whole:])]
        return part

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the unfinished shards, with the position in each."""
        pieces = self._left()
        if self._open is not None and self._open.state is not None:
            pieces = [replace(pieces[0], state=self._open.state(), read=self._num_read), *pieces[1:]]
        return {"epoch": self._epoch, "pieces": [[it.shard, it.following, it.step, it.read, it.state] for it in pieces]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the part, at the position, that `state_dict` described."""
        self._epoch, self._open = state["epoch"], None
        self._pieces = [_Piece(*piece) for piece in state["pieces"]]

    def _left(self) -> list[_Piece]:
        """Return the unfinished pieces; before the first call, all shards of the epoch."""
        return [_Piece(shard) for shard in self.shard_order(self._epoch)] if self._pieces is None else self._pieces
