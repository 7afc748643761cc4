"""Data of PyTorch trials: the loader that a trial builds, and moving batches to a device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from itertools import count, islice
from typing import Any, TypeVar, Union, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler

from dovetail import data
from dovetail.accelerators import send
from dovetail.data.batches import map_leaves, move_object, moves_itself
from dovetail.errors import DataError

_logger = logging.getLogger("dovetail.pytorch")

T_co = TypeVar("T_co", covariant=True)

TorchData = Union[Tensor, NDArray[Any], dict[str, Any], list[Any], tuple[Any, ...]]  # noqa: UP007 - used at run time
"""A batch: a tensor, an array, or a dict, list or tuple of them, nested at will."""


data_length = data.batch_length
"""Return the number of samples in a batch; Determined's name for `batch_length`."""


def to_device(data: Any, device: torch.device | str, warned_types: set[type] | None = None) -> Any:
    """Return data of any structure on a device: arrays become tensors, objects with a method `to` are moved.

    Values that cannot be moved are unchanged, with one log record per type. Text, numbers and None have no device.

    Args:
        data: A tensor, an array, or a structure that contains some.
        device: The device.
        warned_types: The types that were already logged; new ones are added. None means an empty set.

    Example:
        >>> to_device({"image": np.zeros(2), "name": "a"}, "cpu")
        {'image': tensor([0., 0.], dtype=torch.float64), 'name': 'a'}
    """
    target, known = torch.device(device), set[type]() if warned_types is None else warned_types

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.device == target else send(leaf, target)
        # Floats, complex and whole numbers, and booleans; torch has no tensors of text or objects.
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fciub":
            return send(torch.from_numpy(leaf), target)
        if moves_itself(leaf):
            return move_object(leaf, target, non_blocking=True)
        if not isinstance(leaf, _WITHOUT_DEVICE) and type(leaf) not in known:
            known.add(type(leaf))
            _logger.warning("a %s in the data cannot be moved to the device and is left unchanged", type(leaf).__name__)
        return leaf

    return map_leaves(moved, data)


# The containers are here because an empty structure is a leaf.
_WITHOUT_DEVICE = (str, bytes, int, float, complex, np.generic, type(None), list, tuple, dict)


class DataLoader(data.DataLoader[T_co]):
    """A data loader with torch's arguments that a trainer can split over processes, skip in and reproduce.

    If `shuffle` is on and neither a seed nor a generator is given, the trainer orders the samples of each epoch with
    the seed of the trial. Everything else is as in `dovetail.data.DataLoader`.

    Example:
        >>> import torch
        >>> loader = DataLoader(torch.arange(5), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
        >>> [batch.tolist() for batch in islice(loader.get_data_loader(repeat=True, skip=2), 3)]
        [[4], [0, 1], [2, 3]]
    """

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> data.DataLoader[T_co] | EndlessLoader:
        """Return a loader of this process's batches.

        Args:
            repeat: Repeat the epochs without end, each in its own order. The batches of all epochs are distributed
                in turn, so that all processes make equal progress. If False, the loader ends after one epoch.
            skip: Number of batches of this process to leave out of the first pass.
            num_replicas: Number of processes that share the batches.
            rank: Rank of this process.
        """
        if num_replicas > 1 and _is_unseeded(self):
            raise DataError(
                "shuffle: processes that share the batches must agree on their order: give the loader a seed"
            )
        if repeat:
            return EndlessLoader(self, skip, num_replicas, rank)
        loader = data.DataLoader.from_torch(self, num_replicas=num_replicas, rank=rank)
        loader.skip(skip)
        return loader

    def seeded(self, seed: int) -> DataLoader[T_co]:
        """Return the same loader with an order that is a function of `seed` and the epoch alone.

        This is the same object if the order does not depend on global random state: the loader does not shuffle, or it
        has a seed, a generator or a sampler. A loader of a subclass is returned unchanged as well.

        Example:
            >>> loader = DataLoader(range(8), batch_size=8, shuffle=True).seeded(7)
            >>> first, second = (batch.tolist() for _ in range(2) for batch in loader)
            >>> loader.set_epoch(0)
            >>> next(iter(loader)).tolist() == first != second
            True
        """
        # A subclass may have another constructor, so it cannot be rebuilt.
        if type(self) is not DataLoader or not _is_unseeded(self):
            return self
        loader = DataLoader.from_torch(self, seed=seed, num_replicas=self.num_replicas, rank=self.rank)
        return cast("DataLoader[T_co]", loader)


class EndlessLoader:
    """A loader that repeats its epochs without end. Its length is the length of one epoch.

    Args:
        loader: The loader to repeat.
        skip: Number of batches of this process to leave out at the start.
        num_replicas: Number of processes that share the batches of all epochs, in turn.
        rank: Rank of this process.

    Example:
        >>> shares = [EndlessLoader(DataLoader(range(3)), num_replicas=2, rank=rank) for rank in range(2)]
        >>> [[batch.item() for batch in islice(share, 3)] for share in shares]
        [[0, 2, 1], [1, 0, 2]]
    """

    def __init__(self, loader: data.DataLoader[Any], skip: int = 0, num_replicas: int = 1, rank: int = 0) -> None:
        if skip < 0:
            raise DataError(f"skip: expected a number of batches that is not negative, got {skip}")
        if not 0 <= rank < num_replicas:
            raise DataError(f"rank: expected 0 <= rank < num_replicas = {num_replicas}, got {rank}")
        # A copy without the user's division over processes: the batches of all epochs are divided here.
        self._whole = data.DataLoader.from_torch(loader)
        self._skip = skip
        self._num_replicas = num_replicas
        self._rank = rank

    def __len__(self) -> int:
        return len(range(self._rank, len(self._whole), self._num_replicas))

    def __iter__(self) -> Iterator[Any]:
        first = self._rank + self._skip * self._num_replicas
        if isinstance(self._whole.dataset, IterableDataset):
            # A stream has no indices: every process reads all batches and uses its own.
            return islice(self._streamed(), first, None, self._num_replicas)
        return self._dealt(first)

    def _streamed(self) -> Iterator[Any]:
        for epoch in count():
            self._whole.set_epoch(epoch)
            is_empty = True
            for batch in self._whole:
                is_empty = False
                yield batch
            if is_empty:
                raise DataError(_EMPTY)

    def _dealt(self, first: int) -> Iterator[Any]:
        total, num_replicas = len(self._whole), self._num_replicas
        if total == 0:
            raise DataError(_EMPTY)
        # One loader for each rank that this process takes, because the ranks change from epoch to epoch.
        shares: dict[int, data.DataLoader[Any]] = {}
        # The epoch and the batch at which this process starts, because `skip` may be longer than an epoch.
        begun, index = divmod(first, total)
        if self._whole.seed is None:
            for _ in range(begun):
                # Advance the user's generator as if these epochs had been read; no sample is loaded.
                self._whole.skip(total)
                yield from self._whole
        for epoch in count(begun):
            # If the number of batches is not divisible, the next epoch starts with another rank.
            start, turn = divmod(index, num_replicas)
            if turn not in shares:
                shares[turn] = data.DataLoader.from_torch(self._whole, num_replicas=num_replicas, rank=turn)
            shares[turn].set_epoch(epoch)
            shares[turn].skip(start)
            yield from shares[turn]
            # The position of this process's next batch, counted from the start of the next epoch.
            index += len(range(index, total, num_replicas)) * num_replicas - total


_EMPTY = "a loader without batches cannot be repeated"


def _is_unseeded(loader: data.DataLoader[Any]) -> bool:
    """Return whether torch's global generator orders the samples, so that a seed may replace it."""
    sampler = loader.sampler
    return (
        # Exactly torch's sampler of `shuffle=True`; with any other one, the user has chosen the order.
        type(sampler) is RandomSampler
        and sampler.generator is None
        and not sampler.replacement
        and sampler.num_samples == len(cast(Sized, loader.dataset))
    )
