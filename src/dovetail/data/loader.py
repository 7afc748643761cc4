"""A drop-in for torch's `DataLoader` that is faster in memory, sharded by rank, skippable and stateful."""

from __future__ import annotations

import random
import warnings
from collections import deque
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
from dovetail.data.workers import WorkerStates
from dovetail.errors import DataError
from dovetail.runtime.seeds import derive_seed

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch_data.DataLoader[T_co]):
    """Torch's `DataLoader`, with the same arguments, the same batches and the same use of random numbers.

    A `TensorDataset` on the CPU, or a `Subset` of one, with torch's own order and collation is cut into
    batches without touching single samples. `num_workers` means nothing then: no worker is started.
    Everything else (streams, workers, own samplers and collation) runs through torch as it always did.

    Each iteration is one epoch, counted from 0, unless `set_epoch` says which one is next.

    Args:
        dataset: As for torch, like every argument that is not described here.
        pin_memory: Hand out batches in pinned memory if there is an accelerator; otherwise it has no effect.
        generator: Source of the order and of the workers' seeds; None means torch's global one.
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

    _share: _Share
    # Whether a sampler is none of torch's: it may draw while it is read.
    _has_own_order: bool
    _epoch_samplers: list[EpochSampler]
    _generators: list[Generator]
    _next_epoch: int
    _next_start: int
    _pass: _Pass | None
    _workers_seeded: bool
    # What samples draw in workers is derived from this; None leaves it to torch.
    _sample_seed: int | None
    _worker_states: WorkerStates
    # The state of the workers in a pass that is to be continued.
    _restored_workers: Mapping[str, Any] | None

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
        samplers: list[object] = [self.sampler, self.batch_sampler]
        if isinstance(batch_sampler, BatchSampler):
            samplers.append(batch_sampler.sampler)
        own = [each for each in samplers if type(each) not in _TORCH_SAMPLERS]
        # At once: torch's class checks every single assignment, which federations with many short loaders notice.
        vars(self).update(
            _share=_Share(self.sampler if self.batch_sampler is None else self.batch_sampler, num_replicas, rank),
            _has_own_order=bool(own),
            _epoch_samplers=[each for each in own if isinstance(each, EpochSampler)],
            _generators=_distinct([self.generator, *map(_generator_of, samplers)], leave_out=self._seeded),
            _next_epoch=0,
            _next_start=0,
            _pass=None,
            _workers_seeded=False,
            _sample_seed=None,
            _worker_states=_NO_WORKERS,
            _restored_workers=None,
        )
        if num_workers:
            self._seed_samples(None if _is_stream(dataset) else seed)

    @classmethod
    def from_torch(
        cls, loader: torch_data.DataLoader[T_co], *, seed: int | None = None, num_replicas: int = 1, rank: int = 0
    ) -> DataLoader[T_co]:
        """Return a loader of the same batches as `loader`, able to skip and to be shared by ranks.

        Both draw from the same generators, so use one of them at a time. A loader of this class keeps its seed.

        Args:
            loader: The loader whose batches are wanted.
            seed: Orders the samples where torch's global generator would; any other source of order is kept. What
                samples draw in workers follows from seed, epoch and batch.
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
            order = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
        given_seed = seed
        seed, is_shuffled = _seeding(loader, seed)
        if is_shuffled:
            order |= {"sampler": None, "shuffle": True}
        made = cls(
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
        if made.num_workers and made.seed is None and given_seed is not None and not _is_stream(loader.dataset):
            made._seed_samples(given_seed)
        return made

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
        running = self._pass or _Pass(
            self._next_epoch, self._next_start, self._workers_seeded, self._random_states(), self._first_states()
        )
        workers = self._worker_states
        return {
            "epoch": running.epoch,
            "position": running.position,
            "seed": self.seed,
            "workers_seeded": running.workers_seeded,
            "generators": running.generators,
            "workers": self._restored_workers
            or {
                "start": running.workers,
                "now": list(workers.states),
                "next": workers.next_role,
                "pending": list(self._share.pending),
            },
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
        self._restored_workers = self._fitting_workers(state)
        self._restart_workers()
        self.set_epoch(state["epoch"])
        self.skip(state["position"])

    def __len__(self) -> int:
        total = super().__len__()
        return len(range(self.rank, total, self.num_replicas)) if _is_stream(self.dataset) else total

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class here
        if self._pass is not None:
            self._next_epoch = self._pass.epoch + 1
            # Persistent workers have read ahead in a pass that was not finished, and have drawn for it.
            self._restart_workers()
        start, self._next_start = self._next_start, 0
        running = self._pass = _Pass(
            self._next_epoch, start, self._workers_seeded, self._random_states(), self._first_states()
        )
        rows = rows_in_memory(self)
        for purpose, generator in enumerate(self._seeded):
            # The first is that of workers, which rows do without.
            if purpose or rows is None:
                generator.manual_seed(derive_seed(self.seed or 0, self._next_epoch, purpose, rule="loader"))
        batches = self._torch_batches(start) if rows is None else self._sliced_batches(rows, start)
        self._workers_seeded = self.persistent_workers
        return self._counted(running, batches)

    def _counted(self, running: _Pass, batches: Iterator[Any]) -> Iterator[Any]:
        pending = self._share.pending
        for batch in batches:
            running.position += 1
            if pending:
                pending.popleft()
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
        is_stream, generator, share = _is_stream(self.dataset), self.generator, self._share
        restored, self._restored_workers = self._restored_workers, None
        if self._workers_seeded and not self._seeded:
            # Torch seeds persistent workers once. Those of a loader that continues another one's run are
            # seeded from elsewhere, since the other one drew nothing for them in this epoch.
            self.generator = Generator().manual_seed(self._next_epoch)
        share.start, share.pending = start, deque()
        share.seeds = (self._sample_seed, self._next_epoch) if self._sample_seed is not None else None
        share.records = self.num_workers > 0 and self.num_replicas == 1 and self._has_own_order
        if restored is not None and start and not is_stream:
            if self.num_workers:
                self._worker_states.start(restored["now"], restored["next"])
            share.pending.extend(restored["pending"])
        elif self.num_workers:
            if self._worker_states.is_rotated:
                self._restart_workers()
            self._worker_states.start(self._first_states() if restored is None else restored["start"], 0)
        try:
            batches = self._worker_batches() if self.num_workers else super().__iter__()
        finally:
            self.generator = generator
        if not is_stream:
            if start or self._seeded:
                assert share.latest is not None
                (share.latest.skip if start else share.latest.draw)()
            return batches
        # A stream is read again from the start of the epoch, by workers that draw the same numbers again.
        for _ in islice(batches, start * self.num_replicas):
            pass
        return islice(batches, self.rank, None, self.num_replicas)

    def _worker_batches(self) -> Iterator[Any]:
        with self._worker_states.installed(self):
            batches: Iterator[Any] = super().__iter__()
        return self._worker_states.unstamped(batches)

    def _seed_samples(self, seed: int | None) -> None:
        """Derive what samples draw in workers from a seed, the epoch and the batch; None leaves it to torch."""
        self._sample_seed = seed
        self._worker_states = WorkerStates(self.num_workers, keeps_global=seed is None)

    def _first_states(self) -> list[dict[str, Any] | None]:
        """Return the random states that the workers of the next pass start from."""
        if self._restored_workers is not None:
            return list(self._restored_workers["start"])
        return list(self._worker_states.states) if self.persistent_workers else [None] * self.num_workers

    def _fitting_workers(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the state of the workers in a loader's state; None, with a warning, if there were more or fewer."""
        # Checkpoints of earlier versions have no states of workers.
        workers: Mapping[str, Any] | None = state.get("workers")
        if workers is None or len(workers["start"]) == self.num_workers:
            return workers
        continues = state["position"] or any(workers["start"])
        holds_states = any([*workers["start"], *workers["now"]]) or not (self.num_workers and workers["start"])
        if continues and holds_states and rows_in_memory(self) is None:
            warnings.warn(
                f"the checkpoint was written with num_workers={len(workers['start'])} and is continued with "
                f"num_workers={self.num_workers}: if samples draw random numbers, such as random crops, the rest of "
                "this epoch differs from the uninterrupted run",
                UserWarning,
                stacklevel=3,
            )
        return None

    def _restart_workers(self) -> None:
        """Let the next pass start new workers, also if they are persistent."""
        self._iterator = None

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
    # Of each worker; None for one that torch seeds, and an empty list without workers.
    workers: list[dict[str, Any] | None]


@runtime_checkable
class EpochSampler(Protocol):
    """A sampler whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`."""


_NO_WORKERS = WorkerStates(0)

# What a seed is mixed with for the random numbers of samples; 0 and 1 are the generators of a loader.
_IN_WORKERS = 2

# They have no epoch, and need not be asked: a look at a protocol takes a while.
_TORCH_SAMPLERS = (
    type(None),
    SequentialSampler,
    RandomSampler,
    BatchSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class _Share(Sampler[Any]):
    """Every `num_replicas`-th item of a sampler from number `rank` on, without the first `start` of those.

    Attributes:
        start: Items of this share that are left out at the beginning of the next pass.
        seeds: The numbers that the random numbers of a batch are derived from, besides the batch's own; None if
            workers keep the seeds that torch gave them.
        records: Whether items that were drawn and not handed out yet are recorded in `pending`. A sampler that draws
            while it is read would draw others if it were read again.
        pending: These items, in order. The next pass starts with those that are in it.
        latest: The iterator of the last pass that was started.
    """

    def __init__(self, whole: Iterable[Any], num_replicas: int, rank: int) -> None:
        self.start = 0
        self.seeds: tuple[int, int] | None = None
        self.records = False
        self.pending: deque[Any] = deque()
        self._whole = whole
        self._num_replicas = num_replicas
        self._rank = rank
        self.latest: _Indices | None = None

    def __len__(self) -> int:
        return len(range(self._rank, len(cast(Sized, self._whole)), self._num_replicas))

    def __iter__(self) -> Iterator[Any]:
        self.latest = _Indices(self, self._whole, self._rank, self._num_replicas)
        return self.latest


class _Seeded:
    """The indices of a batch, and the seed of the random numbers that its samples draw.

    It is pickled on the way to a worker, and the worker unpickles it right before it reads the batch. There it seeds
    the generators and becomes the indices alone. So a sample is cropped in the same way whichever worker reads it, and
    whatever that worker has read before: also in a run that continues in the middle of an epoch.
    """

    __slots__ = ("indices", "seed")

    def __init__(self, indices: Any, seed: int) -> None:
        self.indices = indices
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _seed_worker, (self.indices, self.seed)


def _seed_worker(indices: Any, seed: int) -> Any:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    return indices


class _Indices(Iterator[Any]):
    """The items of one pass over a share. It can draw before it is asked for an item."""

    def __init__(self, share: _Share, whole: Iterable[Any], rank: int, num_replicas: int) -> None:
        self._seeds = share.seeds
        self._pending = share.pending if share.records else None
        self._drawn = deque(share.pending)
        self._numbered = enumerate(whole)
        self._num_skipped = rank + (share.start + len(share.pending)) * num_replicas
        self._num_between = num_replicas - 1
        self._has_skipped = False

    def __next__(self) -> Any:
        if self._drawn:
            return self._drawn.popleft()
        num_skipped, self._num_skipped, self._has_skipped = self._num_skipped, self._num_between, True
        number, indices = next(islice(self._numbered, num_skipped, None) if num_skipped else self._numbered)
        if self._pending is not None:
            self._pending.append(indices)
        if self._seeds is None:
            return indices
        return _Seeded(indices, derive_seed(*self._seeds, _IN_WORKERS, number, rule="loader"))

    def draw(self) -> None:
        """Draw the order now, rather than when the first item is requested."""
        self._drawn.extend(islice(self, 1))

    def skip(self) -> None:
        """Draw the items that are left out now."""
        if not self._has_skipped:
            num_skipped, self._num_skipped, self._has_skipped = self._num_skipped, 0, True
            for _ in islice(self._numbered, num_skipped):
                pass


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


def _sources(seed: int | None, num_generators: int) -> str:
    return f"{'no seed' if seed is None else 'a seed'} and {num_generators} generators"
