"""Data-loader strategies: how a training set is divided into batches.

With every strategy, indices given as a sampler are read in a new order every epoch, as torch's `SubsetRandomSampler`
does; a torch sampler keeps its own order. Orders are derived from `context.state["order_seed"]` and the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import IterableDataset, Sampler

from dovetail.data import DataLoader, SamplerSource, as_loader
from dovetail.errors import DataError
from dovetail.runtime.seeds import derive_seed
from dovetail.trainers.strategies.base import DataLoaderStrategy
from dovetail.trainers.strategies.nesting import Described
from dovetail.units import check_count

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False, repr=False)
class DefaultDataLoaderStrategy(Described, DataLoaderStrategy):
    """Batches in the order of the data or of the sampler.

    Args:
        num_workers: Worker processes that read samples.
        pin_memory: Return batches in pinned memory if CUDA is available.
        drop_last: Skip a last batch that is not full.
        shuffle: Draw a new order every epoch.
        persistent_workers: Keep the worker processes between epochs.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> loader = DefaultDataLoaderStrategy().create_train_loader(torch.arange(5), None, 2, TrainingContext())
        >>> [batch.tolist() for (batch,) in loader]
        [[0, 1], [2, 3], [4]]
    """

    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False
    shuffle: bool = False
    persistent_workers: bool = False

    def create_train_loader(
        self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
    ) -> Iterable[Any]:
        """Return the training batches."""
        return _loader(
            trainset,
            sampler,
            batch_size,
            context,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
            persistent_workers=self.persistent_workers,
        )


@dataclass(frozen=True, eq=False, repr=False)
class CustomCollateFnDataLoaderStrategy(Described, DataLoaderStrategy):
    """Batches that a user's function builds from samples.

    Args:
        collate_fn: Builds a batch from a list of samples.
        num_workers: Worker processes that read samples.
        pin_memory: Return batches in pinned memory if CUDA is available.
        drop_last: Skip a last batch that is not full.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> strategy = CustomCollateFnDataLoaderStrategy(lambda samples: sum(int(x) for (x,) in samples))
        >>> list(strategy.create_train_loader(torch.arange(5), None, 2, TrainingContext()))
        [1, 5, 4]
    """

    collate_fn: Collate
    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False

    def create_train_loader(
        self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
    ) -> Iterable[Any]:
        """Return the training batches."""
        return _loader(
            trainset,
            sampler,
            batch_size,
            context,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            drop_last=self.drop_last,
        )


@dataclass(frozen=True, eq=False, repr=False)
class PrefetchDataLoaderStrategy(Described, DataLoaderStrategy):
    """Batches that worker processes read in advance; the processes are kept between epochs.

    Tensors in memory need no worker process, so none is started for them.

    Args:
        prefetch_factor: Batches that each process reads in advance.
        num_workers: Worker processes that read samples.
        pin_memory: Return batches in pinned memory if CUDA is available.
        drop_last: Skip a last batch that is not full.

    Example:
        >>> PrefetchDataLoaderStrategy(prefetch_factor=4)
        PrefetchDataLoaderStrategy(prefetch_factor=4)
    """

    prefetch_factor: int = 2
    num_workers: int = 2
    pin_memory: bool = False
    drop_last: bool = False

    def create_train_loader(
        self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
    ) -> Iterable[Any]:
        """Return the training batches."""
        return _loader(
            trainset,
            sampler,
            batch_size,
            context,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            drop_last=self.drop_last,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=True,
        )


@dataclass(frozen=True, eq=False, repr=False)
class ShuffleDataLoaderStrategy(Described, DataLoaderStrategy):
    """Batches in a new random order every epoch; a torch sampler keeps its own order.

    Args:
        num_workers: Worker processes that read samples.
        pin_memory: Return batches in pinned memory if CUDA is available.
        drop_last: Skip a last batch that is not full.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> (batch,), = ShuffleDataLoaderStrategy().create_train_loader(torch.arange(9), None, 9, TrainingContext())
        >>> sorted(batch.tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """

    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False

    def create_train_loader(
        self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
    ) -> Iterable[Any]:
        """Return the training batches."""
        return _loader(
            trainset,
            sampler,
            batch_size,
            context,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            drop_last=self.drop_last,
            shuffle=True,
        )


@dataclass(eq=False, repr=False)
class DynamicBatchSizeDataLoaderStrategy(Described, DataLoaderStrategy):
    """Batches whose size a function returns once per epoch.

    Args:
        initial_batch_size: The size without a function, and the value of `context.state["batch_size"]` in its first
            call. The trainer's own batch size is not used.
        max_batch_size: The largest batch.
        adjust_fn: Returns the size for the epoch that starts; `context.state["batch_size"]` is the previous size.
        num_workers: Worker processes that read samples.
        pin_memory: Return batches in pinned memory if CUDA is available.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> strategy = DynamicBatchSizeDataLoaderStrategy(adjust_fn=lambda context: 2 * context.current_epoch)
        >>> context = TrainingContext()
        >>> loader = strategy.create_train_loader(torch.arange(8), None, 1, context)
        >>> context.progress.epoch = 2
        >>> before = len(loader); strategy.on_epoch_start(context); before, len(loader)
        (4, 2)
    """

    initial_batch_size: int = 32
    max_batch_size: int = 128
    adjust_fn: Callable[[TrainingContext], int] | None = None
    num_workers: int = 0
    pin_memory: bool = False
    _batches: _SizedBatches | None = field(default=None, init=False)
    _sized_epoch: int = field(default=-1, init=False)
    _restored: Mapping[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_count("initial_batch_size", self.initial_batch_size)
        check_count("max_batch_size", self.max_batch_size)

    def create_train_loader(
        self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
    ) -> Iterable[Any]:
        """Return the training batches.

        Raises:
            DataError: The data is a stream, or already in batches.
        """
        # Only the dataset and the order of this loader are used.
        whole = as_loader(trainset, batch_size=1, sampler=sampler)
        if whole is trainset or not isinstance(whole, DataLoader) or isinstance(whole.dataset, IterableDataset):
            raise DataError(f"{self!r} forms batches itself: expected a dataset with indices, got {trainset!r}")
        shuffles = sampler is not None and not isinstance(_resolved(sampler), Sampler)
        restored, self._restored = self._restored, {}
        size = restored.get("batch_size", self.initial_batch_size)
        self._batches = _SizedBatches(whole.sampler, shuffles, context.state.get("order_seed"), size)
        self._sized_epoch = restored.get("epoch", -1)
        context.state["batch_size"] = size
        # The loader is built on first use, which may be after the `on_epoch_start` of its first epoch.
        self.on_epoch_start(context)
        return DataLoader(
            whole.dataset, batch_sampler=self._batches, num_workers=self.num_workers, pin_memory=self.pin_memory
        )

    def on_epoch_start(self, context: TrainingContext) -> None:
        """Update the batch size for the epoch, unless the loader was created for this epoch."""
        if self._batches is not None and context.progress.epoch != self._sized_epoch:
            self._set_size(context)

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the running epoch's batches."""
        if self._batches is None:
            return dict(self._restored)
        return {"batch_size": self._batches.batch_size, "epoch": self._sized_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        if self._batches is None:
            # A resumed run restores its state before it creates the loader.
            self._restored = dict(state)
        elif state:
            self._batches.batch_size, self._sized_epoch = state["batch_size"], state["epoch"]

    def _set_size(self, context: TrainingContext) -> None:
        """Set the batch size for the epoch that starts: the result of `adjust_fn`, at most `max_batch_size`."""
        assert self._batches is not None
        context.state["batch_size"] = self._batches.batch_size
        # The loader may be built between two epochs: the function receives the number of the epoch that starts.
        run = context.run
        before, run.is_in_epoch = run.is_in_epoch, True
        try:
            size = self.initial_batch_size if self.adjust_fn is None else self.adjust_fn(context)
        finally:
            run.is_in_epoch = before
        check_count("adjust_fn", size)
        self._batches.batch_size = context.state["batch_size"] = min(size, self.max_batch_size)
        self._sized_epoch = context.progress.epoch


class _SizedBatches(Sampler[list[int]]):
    """Lists of indices whose length may change between epochs."""

    def __init__(self, order: Iterable[int], shuffles: bool, seed: int | None, batch_size: int) -> None:
        self.batch_size = batch_size
        self._order = order
        self._shuffles = shuffles
        self._seed = torch.initial_seed() if seed is None else seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(cast(Sized, self._order)) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self._order)
        if self._shuffles:
            # From the seed and the epoch alone, so that a resumed epoch has the same order.
            generator = torch.Generator().manual_seed(derive_seed(self._seed, self._epoch, rule="sized_batches"))
            indices = [indices[place] for place in torch.randperm(len(indices), generator=generator).tolist()]
        for start in range(0, len(indices), self.batch_size):
            yield indices[start : start + self.batch_size]


def _resolved(sampler: Any) -> Any:
    # A dictionary also has a method `get`, but is no source of a sampler.
    if sampler is None or isinstance(sampler, Mapping):
        return sampler
    return sampler.get() if isinstance(sampler, SamplerSource) else sampler


def _loader(
    trainset: Any,
    sampler: Any,
    batch_size: int,
    context: TrainingContext,
    *,
    num_workers: int,
    pin_memory: bool,
    drop_last: bool,
    shuffle: bool = False,
    collate_fn: Collate | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
) -> Iterable[Any]:
    """Return the loader of a training set; indices are shuffled every epoch, a torch sampler keeps its order."""
    sampler = _resolved(sampler)
    seed = context.state.get("order_seed")
    shuffle = shuffle or (sampler is not None and not isinstance(sampler, Sampler))
    loader = as_loader(
        trainset,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
        seed=seed,
        sampler=sampler,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
    )
    if not isinstance(loader, DataLoader) or not loader.num_workers or loader is trainset:
        return loader
    if prefetch_factor is None and not persistent_workers:
        return loader
    # `loader` has the dataset and the order of the user's data and sampler; only the workers' settings are missing.
    own_order = isinstance(sampler, Sampler) or isinstance(loader.dataset, IterableDataset)
    return DataLoader(
        loader.dataset,
        batch_size,
        False if own_order else shuffle,
        sampler if isinstance(sampler, Sampler) else None,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        drop_last=drop_last,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        seed=seed,
    )
