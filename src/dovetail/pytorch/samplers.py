"""Composable samplers: each wraps another sampler and repeats, shares, skips or shuffles its items.

The right order for training is shuffle, batch, repeat, share, skip. A batch sampler yields lists of indices, one list
per batch; pass it to a loader as `batch_sampler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, Sampler

from dovetail.data.loader import EpochSampler
from dovetail.errors import DataError
from dovetail.runtime.seeds import derive_seed

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
]

T = TypeVar("T")


class _Wrapper(Sampler[T]):
    """Base class of samplers that wrap another sampler and forward the epoch to it."""

    def __init__(self, sampler: Sampler[T] | Iterable[T]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(cast(Sized, self.sampler))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass in the nearest wrapped sampler that has epochs."""
        sampler: object = self.sampler
        # A batch sampler of torch has no epochs and does not forward them to the sampler inside.
        while isinstance(sampler, BatchSampler) and not isinstance(sampler, EpochSampler):
            sampler = sampler.sampler
        if isinstance(sampler, EpochSampler):
            sampler.set_epoch(epoch)


class RepeatSampler(_Wrapper[T]):
    """Repeats a sampler without end. Its length is the length of one pass.

    Args:
        sampler: The sampler to repeat.

    Example:
        >>> list(islice(RepeatSampler(range(3)), 7))
        [0, 1, 2, 0, 1, 2, 0]
    """

    def __iter__(self) -> Iterator[T]:
        while True:
            is_empty = True
            for item in self.sampler:
                is_empty = False
                yield item
            if is_empty:
                # Otherwise the loop would run forever without an item.
                raise DataError("sampler: expected a sampler with at least one index, got none")


# Determined has two classes per sampler, for indices and for batches. Here a batch is an item like any other, so the
# second class is only a name.
class RepeatBatchSampler(RepeatSampler[list[Any]]):
    """`RepeatSampler` for the batches of a batch sampler.

    Example:
        >>> list(islice(RepeatBatchSampler(BatchSampler(range(3), 2, drop_last=False)), 3))
        [[0, 1], [2], [0, 1]]
    """

    def __init__(self, batch_sampler: Sampler[list[Any]] | Iterable[list[Any]]) -> None:
        super().__init__(batch_sampler)


class DistributedSampler(_Wrapper[T]):
    """Yields every `num_workers`-th item of a sampler, starting with item `rank`.

    All ranks together yield each item exactly once. If the items do not divide evenly, the first ranks get one more.

    Args:
        sampler: The sampler to share; it must be the same in every process.
        num_workers: Number of processes.
        rank: Rank of this process.

    Example:
        >>> [list(DistributedSampler(range(5), num_workers=2, rank=rank)) for rank in range(2)]
        [[0, 2, 4], [1, 3]]
    """

    def __init__(self, sampler: Sampler[T] | Iterable[T], num_workers: int, rank: int) -> None:
        if not 0 <= rank < num_workers:
            raise DataError(f"rank: expected 0 <= rank < num_workers = {num_workers}, got {rank}")
        super().__init__(sampler)
        self.num_workers = num_workers
        self.rank = rank

    def __len__(self) -> int:
        # The number of items r, r + n, r + 2 n, … below the length.
        return len(range(self.rank, super().__len__(), self.num_workers))

    def __iter__(self) -> Iterator[T]:
        return islice(self.sampler, self.rank, None, self.num_workers)


class DistributedBatchSampler(DistributedSampler[list[Any]]):
    """`DistributedSampler` for the batches of a batch sampler.

    Example:
        >>> batches = BatchSampler(range(5), 2, drop_last=False)
        >>> [list(DistributedBatchSampler(batches, num_workers=2, rank=rank)) for rank in range(2)]
        [[[0, 1], [4]], [[2, 3]]]
    """

    def __init__(self, batch_sampler: Sampler[list[Any]] | Iterable[list[Any]], num_workers: int, rank: int) -> None:
        super().__init__(batch_sampler, num_workers, rank)


class SkipSampler(_Wrapper[T]):
    """Skips the first items of the first pass over a sampler only. Its length is the length of a whole pass.

    Args:
        sampler: The sampler to skip items of.
        skip: Number of items to skip.

    Example:
        >>> sampler = SkipSampler(range(4), skip=3)
        >>> list(sampler), list(sampler), len(sampler)
        ([3], [0, 1, 2, 3], 4)
    """

    def __init__(self, sampler: Sampler[T] | Iterable[T], skip: int) -> None:
        if skip < 0:
            raise DataError(f"skip: expected a number that is not negative, got {skip}")
        super().__init__(sampler)
        self.skip = skip
        self._start = skip

    def __iter__(self) -> Iterator[T]:
        # Reset at once: a pass that is not finished counts as the first one, too.
        start, self._start = self._start, 0
        return islice(self.sampler, start, None)


class SkipBatchSampler(SkipSampler[list[Any]]):
    """`SkipSampler` for the batches of a batch sampler.

    Example:
        >>> list(SkipBatchSampler(BatchSampler(range(5), 2, drop_last=False), skip=1))
        [[2, 3], [4]]
    """

    def __init__(self, batch_sampler: Sampler[list[Any]] | Iterable[list[Any]], skip: int) -> None:
        super().__init__(batch_sampler, skip)


class ReproducibleShuffleSampler(_Wrapper[T]):
    """Shuffles the items of a sampler, in an order that is a function of the seed and the epoch alone.

    Each pass is one epoch, counted from 0; `set_epoch` sets the epoch of the next pass. If the sampler yields the
    indices of a dataset, the order is the same as in `DataLoader(dataset, shuffle=True, seed=seed)`.

    Args:
        sampler: The sampler to shuffle; it must be finite.
        seed: Any whole number.

    Example:
        >>> sampler = ReproducibleShuffleSampler(range(5), seed=1)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first != second
        True
    """

    def __init__(self, sampler: Sampler[T] | Iterable[T], seed: int) -> None:
        super().__init__(sampler)
        self.seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[T]:
        # The rule of `DataLoader`, so that both have the same order.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self._epoch, 1, rule="loader"))
        self._epoch += 1
        items = list(self.sampler)
        return iter([items[place] for place in torch.randperm(len(items), generator=generator).tolist()])


class ReproducibleShuffleBatchSampler(ReproducibleShuffleSampler[list[Any]]):
    """`ReproducibleShuffleSampler` for the batches of a batch sampler.

    The samples of a batch remain together; shuffling samples before they are batched mixes better.

    Example:
        >>> batches = BatchSampler(range(5), 2, drop_last=False)
        >>> sorted(ReproducibleShuffleBatchSampler(batches, seed=1))
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, batch_sampler: Sampler[list[Any]] | Iterable[list[Any]], seed: int) -> None:
        super().__init__(batch_sampler, seed)
