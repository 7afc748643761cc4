"""Replacement of torch's `DataLoader` that is faster in memory, can be sharded by rank, and can skip and resume."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

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
from dovetail.data.workers import WorkerStates, seed_generators
from dovetail.errors import DataError
from dovetail.runtime.seeds import derive_seed

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch_data.DataLoader[T_co]):
    """Torch's `DataLoader`, with the same arguments, the same batches and the same use of random numbers.

    A `TensorDataset` on the CPU, or a `Subset` of one, with torch's own order and collation is sliced into batches
    without reading single samples. In this case `num_workers` has no effect: no worker is started. Everything else
    (streams, workers, custom samplers and collation) is read by torch as usual.

    Each iteration is one epoch, counted from 0; `set_epoch` sets the epoch of the next iteration.

    Args:
        dataset: As in torch, like every argument that is not described here.
        pin_memory: Whether batches are in pinned memory if there is an accelerator; otherwise it has no effect.
        generator: Source of the order and of the workers' seeds; None means torch's global one.
        seed: Makes the order of `shuffle` a function of this seed and the epoch alone, and leaves the global
            random state unchanged. Random numbers that samples draw in workers depend on seed, epoch and batch.
        num_replicas: Number of loaders that share the batches of each epoch.
        rank: Rank of this loader: it gets batches `rank`, `rank + num_replicas`, and so on. All ranks together get
            exactly the batches of a single loader; some ranks may get one batch more than others.

    Example:
        >>> loader = DataLoader(torch_data.TensorDataset(torch.arange(5)), batch_size=2, shuffle=True, seed=1)
        >>> whole = [batch.tolist() for (batch,) in loader]
        >>> loader.set_epoch(0)
        >>> loader.skip(1)
        >>> [batch.tolist() for (batch,) in loader] == whole[1:]
        True
    """

    _share: _Share
    # Whether a sampler is not one of torch's: it may draw random numbers while it is read.
    _has_own_order: bool
    _epoch_samplers: list[EpochSampler]
    _generators: list[Generator]
    _next_epoch: int
    _next_start: int
    _pass: _Pass | None
    _workers_seeded: bool
    # The seed of random numbers that samples draw in workers; None means torch's own seeding.
    _sample_seed: int | None
    _worker_states: WorkerStates
    # The state of the workers in a pass that is resumed.
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
                # The order has a separate generator: persistent workers draw their seed only in the first epoch, and
                # the order of an epoch must not depend on whether it was the first.
                sampler, shuffle = RandomSampler(cast(Sized, dataset), generator=order_generator), None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            # Without an accelerator torch would warn that pinning has no effect.
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
        # One call of `update`: torch's class checks every assignment, which is slow for federations with many loaders.
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
        """Return a loader of the same batches as `loader` that can skip batches and be shared by ranks.

        Both draw from the same generators, so use only one of them at a time. A loader of this class keeps its seed.

        Args:
            loader: The loader to convert.
            seed: Orders the samples if torch's global generator would order them; other orders are unchanged. Random
                numbers that samples draw in workers depend on seed, epoch and batch.
            num_replicas: Number of loaders that share the batches of each epoch.
            rank: Rank of this loader.

        Raises:
            DataError: A seed is given, and torch's global generator does more than shuffle the dataset.

        Example:
            >>> loader = torch_data.DataLoader(torch_data.TensorDataset(torch.arange(6)), batch_size=2)
            >>> [batch.tolist() for (batch,) in DataLoader.from_torch(loader, num_replicas=2, rank=1)]
            [[2, 3]]
        """
        if _is_stream(loader.dataset):
            order: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_size is None and loader.batch_sampler is not None:
            batches = loader.batch_sampler
            order = {"batch_sampler": batches}
            if type(batches) is BatchSampler:
                # Torch forms the same batches from these, and tensors in memory can then be sliced.
                order = {"batch_size": batches.batch_size, "sampler": batches.sampler, "drop_last": batches.drop_last}
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
        """The current epoch or, between two epochs, the next one."""
        return self._next_epoch if self._pass is None else self._pass.epoch

    @property
    def is_seeded(self) -> bool:
        """Whether the order of an epoch depends on the seed and the epoch alone."""
        if not self._seeded or _is_stream(self.dataset) or type(self.batch_sampler) is not BatchSampler:
            return False
        return type(self.sampler) is SequentialSampler or (
            type(self.sampler) is RandomSampler and self.sampler.generator in self._seeded
        )

    @property
    def draws_at_start(self) -> bool:
        """Whether the order uses torch's global generator only when the first batch of an epoch is read."""
        return not self._has_own_order and all(each is not torch.default_generator for each in self._generators)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in a sampler that has a method `set_epoch`."""
        self._next_epoch = epoch
        self._pass = None
        for sampler in self._epoch_samplers:
            sampler.set_epoch(epoch)

    def skip(self, num_batches: int) -> None:
        """Skip the first `num_batches` batches of the next iteration, and of no later one.

        No sample of a skipped batch is read, except from a stream. Random numbers are used as if the iteration had
        started with its first batch, and the order is drawn as soon as `iter` is called.
        """
        if num_batches < 0:
            raise DataError(f"skip: expected a number of batches that is not negative, got {num_batches}")
        self._next_start = num_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state that another loader needs to continue from here: numbers and tensors only.

        The state of torch's global generator is not included. If this generator shuffles, the caller must restore its
        state at the start of the epoch before the next call of `iter`.
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
        """Continue with exactly the batches that the loader of `state` had not returned yet."""
        if (state["seed"] is None) != (self.seed is None) or len(state["generators"]) != len(self._generators):
            raise DataError(
                "the state of a loader fits only a loader with the same source of order: expected "
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
            # Persistent workers have read ahead in an unfinished pass and have consumed random numbers for it.
            self._restart_workers()
        start, self._next_start = self._next_start, 0
        running = self._pass = _Pass(
            self._next_epoch, start, self._workers_seeded, self._random_states(), self._first_states()
        )
        rows = rows_in_memory(self)
        for purpose, generator in enumerate(self._seeded):
            # The first generator is for workers, which `rows` does not use.
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

    # Batches that torch reads

    @property
    def _index_sampler(self) -> Any:
        # Torch's iterators, with and without workers, read their indices and the loader's length from here. Indices
        # that are left out here are not read by any process, and the user's `sampler` and `batch_sampler` are
        # unchanged.
        return super()._index_sampler if _is_stream(self.dataset) else self._share

    def _torch_batches(self, start: int) -> Iterator[Any]:
        is_stream, generator, share = _is_stream(self.dataset), self.generator, self._share
        restored, self._restored_workers = self._restored_workers, None
        if self._workers_seeded and not self._seeded:
            # Torch seeds persistent workers once. If this loader continues the run of another one, use a separate
            # generator, because the other loader drew no seed in this epoch.
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
            batches = self._worker_batches(0 if is_stream else start) if self.num_workers else super().__iter__()
        finally:
            self.generator = generator
        if not is_stream:
            if start or self._seeded:
                assert share.latest is not None
                (share.latest.skip if start else share.latest.draw)()
            return batches
        # A stream is read again from the start of the epoch, by workers that draw the same random numbers again.
        for _ in islice(batches, start * self.num_replicas):
            pass
        return islice(batches, self.rank, None, self.num_replicas)

    def _worker_batches(self, first: int) -> Iterator[Any]:
        with self._worker_states.installed(self):
            batches: Iterator[Any] = super().__iter__()
        return self._worker_states.unstamped(batches, first)

    def _seed_samples(self, seed: int | None) -> None:
        """Derive the workers' random numbers from a seed, the epoch and the batch; None means torch's seeding."""
        self._sample_seed = seed
        self._worker_states = WorkerStates(self.num_workers, keeps_global=seed is None)

    def _first_states(self) -> list[dict[str, Any] | None]:
        """Return the initial random states of the workers of the next pass."""
        if self._restored_workers is not None:
            return list(self._restored_workers["start"])
        return list(self._worker_states.states) if self.persistent_workers else [None] * self.num_workers

    def _fitting_workers(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the workers' state from a loader's state; None, with a warning, if the number of workers differs."""
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
        """Make the next pass start new workers, even if they are persistent."""
        self._iterator = None

    # Batches in memory

    def _sliced_batches(self, rows: Rows, start: int) -> Iterator[Any]:
        assert self.batch_size is not None
        # Torch draws a seed for its workers even if there are none, so draw one here, too.
        if not self._workers_seeded and not self._seeded:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        # Torch draws the order when it needs the first index. Its workers need it at once. A generator with our seed
        # must be read before the next iteration seeds it again.
        drawn = [self._draw_order(rows)] if start or self.num_workers or self._seeded else []
        return rows.batches(
            drawn.pop if drawn else partial(self._draw_order, rows),
            self._close_order,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            start=start,
            pin_memory=self.pin_memory,
        )

    def _draw_order(self, rows: Rows) -> Tensor | None:
        assert self.batch_size is not None
        order = rows.order(self.sampler)
        if self.num_replicas == 1:
            return order
        return rows.share(order, self.batch_size, self.num_replicas, self.rank)

    def _close_order(self) -> None:
        # When torch's sampler has no more indices, it draws one more permutation. Draw it here, too, so that the user's
        # generator ends in the same state.
        if isinstance(self.sampler, RandomSampler) and self.sampler.generator in self._generators:
            torch.randperm(len(self.sampler), generator=self.sampler.generator)


def iterate_from(loader: Iterable[T], start: int) -> Iterator[T]:
    """Return an iterator over `loader` without its first `start` batches.

    This library's loader, and torch's loader of a dataset with indices, do not read the skipped batches; other
    iterables do. If `start` is not 0, the random numbers of the order are drawn before this function returns, as at
    the start of an epoch. The caller may then set the random state of batch `start`.

    Example:
        >>> list(iterate_from(["a", "b", "c"], 2))
        ['c']
    """
    if start and isinstance(loader, torch_data.DataLoader):
        # A subclass with its own iteration is iterated as it is.
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
    """One iteration: its position, and the random states at its start."""

    epoch: int
    position: int
    workers_seeded: bool
    generators: list[Tensor]
    # One state per worker; None for a worker that torch seeds. An empty list without workers.
    workers: list[dict[str, Any] | None]


@runtime_checkable
class EpochSampler(Protocol):
    """A sampler whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""


_NO_WORKERS = WorkerStates(0)

# The purpose of the seeds of samples in `derive_seed`; 0 and 1 are the purposes of the loader's generators.
_IN_WORKERS = 2

# Samplers without epochs. Listed, because a check of the protocol is slow.
_OWN = (SequentialSampler, RandomSampler, BatchSampler, SubsetRandomSampler, WeightedRandomSampler)
_TORCH_SAMPLERS = (type(None), *_OWN)


class _Share(Sampler[Any]):
    """Every `num_replicas`-th item of a sampler from item `rank`, without the first `start` of these.

    Attributes:
        start: Number of items of this share to skip at the start of the next pass.
        seeds: The seed and the epoch from which, with the number of the batch, the workers' random numbers are derived;
            None if workers keep the seeds that torch gave them.
        records: Whether items that were drawn but not returned yet are recorded in `pending`. A sampler that draws
            while it is read would draw other items if it were read again.
        pending: These items, in order. The next pass starts with them.
        latest: The iterator of the last pass that was started.
    """

    def __init__(self, whole: Iterable[Any], num_replicas: int, rank: int) -> None:
        self.start = 0
        self.seeds: tuple[int, int] | None = None
        self.records = False
        self.pending: deque[Any] = deque()
        self._whole: Any = whole
        self._num_replicas = num_replicas
        self._rank = rank
        self.latest: _Indices | None = None

    def __len__(self) -> int:
        return len(range(self._rank, len(self._whole), self._num_replicas))

    def __iter__(self) -> Iterator[Any]:
        self.latest = _Indices(self, self._whole, self._rank, self._num_replicas)
        return self.latest


class _Seeded:
    """The indices of a batch, and the seed of the random numbers that its samples draw.

    It is pickled for a worker, and the worker unpickles it immediately before it reads the batch. Unpickling seeds the
    generators and returns the indices alone. So a sample is, for example, cropped in the same way by every worker,
    independent of what the worker has read before: also in a run that is resumed in the middle of an epoch.
    """

    __slots__ = ("indices", "seed")

    def __init__(self, indices: Any, seed: int) -> None:
        self.indices = indices
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _seed_worker, (self.indices, self.seed)


def _seed_worker(indices: Any, seed: int) -> Any:
    seed_generators(seed)
    return indices


class _Indices(Iterator[Any]):
    """Iterator over the items of one pass over a share. It can draw before the first item is requested."""

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
        """Draw the order now, not when the first item is requested."""
        self._drawn.extend(islice(self, 1))

    def skip(self) -> None:
        """Draw the skipped items now."""
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
    """Return the seed of a loader, its own if it has one, and whether this seed shuffles the order."""
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
    """Return the sampler of a loader that draws from torch's global generator, if there is one."""
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
