"""Data of trials: the loader that a trial builds, and what a batch is."""

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
from dovetail.data.batches import map_leaves
from dovetail.errors import DataError

_logger = logging.getLogger("dovetail.pytorch")

T_co = TypeVar("T_co", covariant=True)

TorchData = Union[Tensor, NDArray[Any], dict[str, Any], list[Any], tuple[Any, ...]]  # noqa: UP007 - used at run time
"""A batch: a tensor, an array, or a dict, list or tuple of them, nested at will."""


data_length = data.batch_length
"""The number of samples in a batch, by the name that it has in Determined."""


def to_device(data: Any, device: torch.device | str, warned_types: set[type] | None = None) -> Any:
    """Return data of any structure on a device: arrays as tensors there, and whatever else has a method `to`.

    What cannot be moved stays, with a log record for every type of it. Text, Python's numbers and None have no device.

    Args:
        data: A tensor, an array, or a structure that holds some.
        device: The device.
        warned_types: The types that have their log record already; new ones are added. None means none of them has.

    Example:
        >>> to_device({"image": np.zeros(2), "name": "a"}, "cpu")
        {'image': tensor([0., 0.], dtype=torch.float64), 'name': 'a'}
    """
    target, known = torch.device(device), set[type]() if warned_types is None else warned_types

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == target:
            return leaf
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fciub":
            return torch.from_numpy(leaf).to(target)
        move = getattr(leaf, "to", None)
        if callable(move):
            return move(target)
        if not isinstance(leaf, _WITHOUT_DEVICE) and type(leaf) not in known:
            known.add(type(leaf))
            _logger.warning("a %s in the data cannot be moved to the device, and stays", type(leaf).__name__)
        return leaf

    return map_leaves(moved, data)


# Empty structures are leaves, too.
_WITHOUT_DEVICE = (str, bytes, int, float, complex, np.generic, type(None), list, tuple, dict)


class DataLoader(data.DataLoader[T_co]):
    """The loader of a trial: torch's, with the same arguments, that a trainer can share, skip in and reproduce.

    Where `shuffle` is on and neither a seed nor a generator is given, the trainer orders the samples of each epoch by
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
            repeat: Go on for ever, each epoch in its own order; the batches of all epochs are dealt out in turn, so
                that all processes are equally far. Otherwise one epoch is one pass, and dealt out by itself.
            skip: Batches of this process to leave out, of the first pass only.
            num_replicas: How many processes share the batches.
            rank: Which of them this is.
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

        That is this very loader where the order depends on no global random state: it does not shuffle, or has a
        seed, a generator or a sampler of its own. A loader of a subclass stays what it is, too.

        Example:
            >>> loader = DataLoader(range(8), batch_size=8, shuffle=True).seeded(7)
            >>> first, second = (batch.tolist() for _ in range(2) for batch in loader)
            >>> loader.set_epoch(0)
            >>> next(iter(loader)).tolist() == first != second
            True
        """
        if type(self) is not DataLoader or not _is_unseeded(self):
            return self
        loader = DataLoader.from_torch(self, seed=seed, num_replicas=self.num_replicas, rank=self.rank)
        return cast("DataLoader[T_co]", loader)


class EndlessLoader:
    """A loader that begins its next epoch whenever one is through. Its length is that of one epoch.

    Args:
        loader: What to repeat.
        skip: Batches of this process to leave out at the beginning.
        num_replicas: How many processes share the batches of all epochs, in turn.
        rank: Which of them this is.

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
        self._whole = data.DataLoader.from_torch(loader)
        self._skip = skip
        self._num_replicas = num_replicas
        self._rank = rank

    def __len__(self) -> int:
        return len(range(self._rank, len(self._whole), self._num_replicas))

    def __iter__(self) -> Iterator[Any]:
        first = self._rank + self._skip * self._num_replicas
        if isinstance(self._whole.dataset, IterableDataset):
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
        shares: dict[int, data.DataLoader[Any]] = {}
        begun, index = divmod(first, total)
        if self._whole.seed is None:
            for _ in range(begun):
                # Whoever gave a generator finds it where these epochs would have left it; no sample is read.
                self._whole.skip(total)
                yield from self._whole
        for epoch in count(begun):
            # Where the number of batches does not divide, the turns of the next epoch begin elsewhere.
            start, turn = divmod(index, num_replicas)
            if turn not in shares:
                shares[turn] = data.DataLoader.from_torch(self._whole, num_replicas=num_replicas, rank=turn)
            shares[turn].set_epoch(epoch)
            shares[turn].skip(start)
            yield from shares[turn]
            index += len(range(index, total, num_replicas)) * num_replicas - total


_EMPTY = "a loader without batches cannot be repeated"


def _is_unseeded(loader: data.DataLoader[Any]) -> bool:
    """Whether a loader orders its samples by torch's global generator, and would by a seed as well."""
    sampler = loader.sampler
    return (
        type(sampler) is RandomSampler
        and sampler.generator is None
        and not sampler.replacement
        and sampler.num_samples == len(cast(Sized, loader.dataset))
    )
