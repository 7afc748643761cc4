"""A drop-in for torch's `DataLoader` that is faster in memory, sharded by rank, skippable and stateful."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
import torch.utils.data as torch_data
from torch import Generator, Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dovetail.data.slicing import Rows, rows_in_memory
from dovetail.errors import DataError

__all__ = ["DataLoader", "EpochSampler", "iterate_from", "mixed_seed"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch_data.DataLoader[T_co]):
    """Torch's `DataLoader`, with the same arguments, the same batches and the same use of random numbers.

    A `TensorDataset` on the CPU, or a `Subset` of one, with torch's own order and collation is cut into
    batches without touching single samples. `num_workers` means nothing then: no worker is started.
    Everything else (streams, workers, own samplers and collation) runs through torch as it always did.

    Each iteration is one epoch, counted from 0, unless `set_epoch` says which one is next.

    Args:
        dataset: As for torch, like every argument up to `in_order`.
        batch_size: Samples per batch.
        shuffle: Draw a new order every epoch.
        sampler: Indices in the order to read them.
        batch_sampler: Lists of indices, one per batch.
        num_workers: Processes that read samples.
        collate_fn: Makes a batch of a list of samples.
        pin_memory: Hand out batches in pinned memory, where there is an accelerator.
        drop_last: Leave out a last batch that is not full.
        timeout: Seconds to wait for a worker.
        worker_init_fn: Called in each worker first.
        multiprocessing_context: How workers are started.
        generator: Source of the order and of the workers' seeds; `None` is torch's global one.
        prefetch_factor: Batches that each worker reads ahead.
        persistent_workers: Keep workers from epoch to epoch.
        pin_memory_device: Deprecated by torch.
        in_order: Hand out batches in the order of the sampler.
        seed: Makes the order of `shuffle` a function of this seed and the epoch alone, and leaves the global
            random state untouched. What samples draw in workers follows from seed, epoch and batch.
        num_replicas: Number of loaders that share the batches of each epoch.
        rank: Which of them this is: it gets batches `rank`, `rank + num_replicas`, and so on. Together they
            hand out exactly the batches of one loader alone; some may get one batch more than others.

    Example:
        >>> loader = DataLoader(torch_data.TensorDataset(torch.arange(5)), batch_size=2, shuffle=True, seed=1)
        >>> whole = [batch.tolist() for (batch,) in loader]
        >>> loader.set_epoch(0)
        >>> loader.skip(1)
        >>> [batch.tolist() for (batch,) in loader] == whole[1:]
        True
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise DataError(f"rank: expected 0 <= rank < num_replicas = {num_replicas}, got {rank}")
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self._seeded: list[Generator] = []
        if seed is not None:
            if generator is not None:
                raise DataError("DataLoader: expected a seed or a generator, got both")
            generator, order_generator = self._seeded = [Generator(), Generator()]
            if shuffle and sampler is None and batch_sampler is None and not _is_stream(dataset):
                # The order has a generator of its own: persistent workers draw their seed in the first epoch
                # only, and the order of an epoch must not depend on whether it was the first.
                sampler, shuffle = RandomSampler(cast(Sized, dataset), generator=order_generator), None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            # Torch warns of what it would leave out.
            pin_memory and torch.accelerator.is_available(),
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._share = _Share(self.sampler if self.batch_sampler is None else self.batch_sampler, num_replicas, rank)
        samplers: list[object] = [self.sampler, self.batch_sampler]
        if isinstance(batch_sampler, BatchSampler):
            samplers.append(batch_sampler.sampler)
        self._epoch_samplers = [
            each for each in samplers if type(each) not in _TORCH_SAMPLERS and isinstance(each, EpochSampler)
        ]
        self._generators = _distinct([self.generator, *map(_generator_of, samplers)], leave_out=self._seeded)
        self._next_epoch = 0
        self._next_start = 0
        self._pass: _Pass | None = None
        self._workers_seeded = False

    @classmethod
    def from_torch(
        cls, loader: torch_data.DataLoader[T_co], *, seed: int | None = None, num_replicas: int = 1, rank: int = 0
    ) -> DataLoader[T_co]:
        """Return a loader of the same batches as `loader`, able to skip and to be shared by ranks.

        Both draw from the same generators, so use one of them at a time. A loader of this class keeps its seed.

        Args:
            loader: The loader whose batches are wanted.
            seed: Orders the samples where torch's global generator would; any other source of order is kept.
            num_replicas: Number of loaders that share the batches of each epoch.
            rank: Which of them this is.

        Raises:
            DataError: A seed is given, and torch's global generator does more than to shuffle the dataset.

        Example:
            >>> loader = torch_data.DataLoader(torch_data.TensorDataset(torch.arange(6)), batch_size=2)
            >>> [batch.tolist() for (batch,) in DataLoader.from_torch(loader, num_replicas=2, rank=1)]
            [[2, 3]]
        """
        if _is_stream(loader.dataset):
            order: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_size is None and loader.batch_sampler is not None:
            order = {"batch_sampler": loader.batch_sampler}
        else:
            order = {
                "batch_size": loader.batch_size,
                "sampler": loader.sampler,
                "drop_last": loader.drop_last,
            }
        seed, is_shuffled = _seeding(loader, seed)
        if is_shuffled:
            order |= {"sampler": None, "shuffle": True}
        return cls(
            loader.dataset,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator if seed is None else None,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
            in_order=loader.in_order,
            seed=seed,
            num_replicas=num_replicas,
            rank=rank,
            **order,
        )

    @property
    def epoch(self) -> int:
        """The epoch that is running or, between two, the one that comes next."""
        return self._next_epoch if self._pass is None else self._pass.epoch

    @property
    def is_seeded(self) -> bool:
        """Whether the order of an epoch follows from the seed and the epoch alone, whatever else is drawn."""
        if not self._seeded or _is_stream(self.dataset) or type(self.batch_sampler) is not BatchSampler:
            return False
        return type(self.sampler) is SequentialSampler or (
            type(self.sampler) is RandomSampler and self.sampler.generator in self._seeded
        )

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`, and tell a sampler that has a `set_epoch` of its own."""
        self._next_epoch = epoch
        self._pass = None
        for sampler in self._epoch_samplers:
            sampler.set_epoch(epoch)

    def skip(self, num_batches: int) -> None:
        """Start the next iteration, and only that, after its first `num_batches` batches.

        No sample of a skipped batch is read (a stream has to be read all the same). Random numbers are used
        as if the iteration had started at its beginning, and the order is drawn as soon as `iter` is called.
        """
        if num_batches < 0:
            raise DataError(f"skip: expected a number of batches that is not negative, got {num_batches}")
        self._next_start = num_batches

    def state_dict(self) -> dict[str, Any]:
        """Return what another loader needs to continue where this one is: numbers and tensors only.

        The state of torch's global generator is not in it: whoever shuffles with that one restores it as of
        the start of the epoch before the next call of `iter`.
        """
        running = self._pass or _Pass(self._next_epoch, self._next_start, self._workers_seeded, self._random_states())
        return {
            "epoch": running.epoch,
            "position": running.position,
            "seed": self.seed,
            "workers_seeded": running.workers_seeded,
            "generators": running.generators,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the batches that the loader which gave `state` had not handed out yet."""
        if (state["seed"] is None) != (self.seed is None) or len(state["generators"]) != len(self._generators):
            raise DataError(
                "the state of a loader fits one with the same source of order only: expected "
                f"{_sources(self.seed, len(self._generators))}, "
                f"got {_sources(state['seed'], len(state['generators']))}"
            )
        self.seed = state["seed"]
        for generator, random_state in zip(self._generators, state["generators"], strict=True):
            generator.set_state(random_state)
        self._workers_seeded = state["workers_seeded"]
        self.set_epoch(state["epoch"])
        self.skip(state["position"])

    def __len__(self) -> int:
        total = super().__len__()
        return len(range(self.rank, total, self.num_replicas)) if _is_stream(self.dataset) else total

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class here
        if self._pass is not None:
            self._next_epoch = self._pass.epoch + 1
        start, self._next_start = self._next_start, 0
        running = self._pass = _Pass(self._next_epoch, start, self._workers_seeded, self._random_states())
        rows = rows_in_memory(self)
        for purpose, generator in enumerate(self._seeded):
            # The first is that of workers, which rows do without.
            if purpose or rows is None:
                generator.manual_seed(mixed_seed(cast(int, self.seed), self._next_epoch, purpose))
        batches = self._torch_batches(start) if rows is None else self._sliced_batches(rows, start)
        self._workers_seeded = self.persistent_workers
        return self._counted(running, batches)

    def _counted(self, running: _Pass, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            running.position += 1
            yield batch
        if self._pass is running:
            self._pass = None
            self._next_epoch = running.epoch + 1

    def _random_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    # Through torch

    @property
    def _index_sampler(self) -> Any:
        # This is where torch's iterators, with and without workers, take their indices from, and its length
        # is the loader's. What is left out here is never read by any process, and `sampler` and
        # `batch_sampler` stay what the user made them.
        return super()._index_sampler if _is_stream(self.dataset) else self._share

    def _torch_batches(self, start: int) -> Iterator[Any]:
        generator = self.generator
        if self._workers_seeded and not self._seeded:
            # Torch seeds persistent workers once. Those of a loader that continues another one's run are
            # seeded from elsewhere, since the other one drew nothing for them in this epoch.
            self.generator = Generator().manual_seed(self._next_epoch)
        self._share.start = start
        self._share.seeds = (cast(int, self.seed), self._next_epoch) if self._seeded and self.num_workers else None
        try:
            batches: Iterator[Any] = super().__iter__()
        finally:
            self.generator = generator
        if not _is_stream(self.dataset):
            if start or self._seeded:
                self._share.draw()
            return batches
        for _ in islice(batches, start * self.num_replicas):
            pass
        return islice(batches, self.rank, None, self.num_replicas)

    # In memory

    def _sliced_batches(self, rows: Rows, start: int) -> Iterator[list[Tensor]]:
        assert self.batch_size is not None
        # Torch draws a seed for its workers even when it has none, and so moves the generator on.
        if not self._workers_seeded and not self._seeded:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        # Torch draws the order when it needs the first index. Its workers need that at once, and a generator
        # with our seed is ours only until the next iteration starts.
        drawn = [self._draw_order(rows)] if start or self.num_workers or self._seeded else []
        return rows.batches(
            drawn.pop if drawn else partial(self._draw_order, rows),
            self._close_order,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            start=start,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
        )

    def _draw_order(self, rows: Rows) -> Tensor | None:
        assert self.batch_size is not None
        order = rows.order(self.sampler)
        if self.num_replicas == 1:
            return order
        return rows.share(order, self.batch_size, self.num_replicas, self.rank)

    def _close_order(self) -> None:
        # When torch's sampler runs out of indices it draws one more permutation, for an empty remainder.
        # Whoever gave the generator finds it moved on by that much.
        if isinstance(self.sampler, RandomSampler) and self.sampler.generator in self._generators:
            torch.randperm(len(self.sampler), generator=self.sampler.generator)


def iterate_from(loader: Iterable[T], start: int) -> Iterator[T]:
    """Iterate over `loader` without its first `start` batches.

    This library's loader, and torch's own over a dataset with indices, do not read what is left out; other
    iterables do. When `start` is not 0, the random numbers that the order needs are drawn before it returns,
    as at the beginning of an epoch: the caller may set the random state of batch `start` afterwards.

    Example:
        >>> list(iterate_from(["a", "b", "c"], 2))
        ['c']
    """
    if start and isinstance(loader, torch_data.DataLoader):
        # A class with an iteration of its own must be iterated its own way.
        if type(loader).__iter__ is torch_data.DataLoader.__iter__:
            loader = DataLoader.from_torch(loader)
        if isinstance(loader, DataLoader):
            loader.skip(start)
            return iter(loader)
    iterator = iter(loader)
    for _ in islice(iterator, start):
        pass
    return iterator


@dataclass(slots=True)
class _Pass:
    """One iteration: where it is, and the random states it started from."""

    epoch: int
    position: int
    workers_seeded: bool
    generators: list[Tensor]


@runtime_checkable
class EpochSampler(Protocol):
    """A sampler whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`."""


# What a seed is mixed with for the random numbers of samples; 0 and 1 are the generators of a loader.
_IN_WORKERS = 2

# They have no epoch, and need not be asked: a look at a protocol takes a while.
_TORCH_SAMPLERS = (type(None), SequentialSampler, RandomSampler, BatchSampler)


class _Share(Sampler[Any]):
    """Every `num_replicas`-th item of a sampler from number `rank` on, without the first `start` of those."""

    def __init__(self, whole: Iterable[Any], num_replicas: int, rank: int) -> None:
        self.start = 0
        # What the random numbers of a batch follow from, besides its number; None to leave them to torch.
        self.seeds: tuple[int, int] | None = None
        self._whole = whole
        self._num_replicas = num_replicas
        self._rank = rank
        self._latest: _Indices | None = None

    def __len__(self) -> int:
        return len(range(self._rank, len(cast(Sized, self._whole)), self._num_replicas))

    def __iter__(self) -> Iterator[Any]:
        first = self._rank + self.start * self._num_replicas
        rest: Iterator[Any] = islice(enumerate(self._whole), first, None, self._num_replicas)
        if self.seeds is None:
            self._latest = _Indices(indices for _, indices in rest)
        else:
            seeds = self.seeds
            self._latest = _Indices(
                _Seeding(indices, mixed_seed(*seeds, _IN_WORKERS, number)) if type(indices) is list else indices
                for number, indices in rest
            )
        return self._latest

    def draw(self) -> None:
        """Make the latest iteration draw its order now, rather than when its first item is asked for."""
        assert self._latest is not None
        self._latest.draw()


class _Seeding(list[Any]):
    """The indices of a batch. The worker that begins to read them draws from generators that follow from the batch.

    So a sample is cropped in the same way whichever worker reads it, and whatever that worker has read before: also in
    a run that goes on in the middle of an epoch.
    """

    def __init__(self, indices: Iterable[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        if torch_data.get_worker_info() is not None:
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)
            torch.default_generator.manual_seed(self.seed)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self[:], self.seed)


class _Indices(Iterator[Any]):
    """An iterator that can take its next item in advance."""

    def __init__(self, rest: Iterator[Any]) -> None:
        self._rest = rest
        self._taken: list[Any] = []

    def __next__(self) -> Any:
        return self._taken.pop() if self._taken else next(self._rest)

    def draw(self) -> None:
        self._taken = list(islice(self._rest, 1))


def _is_stream(dataset: Dataset[Any]) -> bool:
    return isinstance(dataset, IterableDataset)


def _generator_of(sampler: object) -> Generator | None:
    return (
        sampler.generator if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)) else None
    )


def _seeding(loader: torch_data.DataLoader[Any], seed: int | None) -> tuple[int | None, bool]:
    """Return the seed of a loader, its own if it has one, and whether the order is shuffled by it."""
    if isinstance(loader, DataLoader) and loader.seed is not None:
        return loader.seed, _generator_of(loader.sampler) in loader._seeded
    drawn = None if seed is None or _is_stream(loader.dataset) else _drawn_globally(loader)
    if drawn is None:
        return None, False
    is_permutation = isinstance(drawn, RandomSampler) and not drawn.replacement
    if drawn is not loader.sampler or not is_permutation or len(cast(Sized, drawn)) != len(cast(Sized, loader.dataset)):
        raise DataError(
            f"give the {type(drawn).__name__} a generator: processes that share its samples must agree on them"
        )
    return seed, True


def _drawn_globally(loader: torch_data.DataLoader[Any]) -> Sampler[Any] | None:
    """The sampler of a loader that draws from torch's global generator, if there is one."""
    batches = loader.batch_sampler
    sampler = batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
    draws = isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
    return cast(Sampler[Any], sampler) if draws and _generator_of(sampler) is None else None


def _distinct(generators: Iterable[Generator | None], leave_out: list[Generator]) -> list[Generator]:
    found: list[Generator] = []
    for generator in generators:
        if generator is not None and generator not in found and generator not in leave_out:
            found.append(generator)
    return found


def mixed_seed(*numbers: int) -> int:
    """Return a seed of 64 bits that differs, without a pattern, for every other row of numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _sources(seed: int | None, num_generators: int) -> str:
    return f"{'no seed' if seed is None else 'a seed'} and {num_generators} generators"
