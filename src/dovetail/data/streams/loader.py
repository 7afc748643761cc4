"""Loader of batches from a stream: divided among processes and workers, and continued by any number of both."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils.data as torch_data
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, default_collate, default_convert

from dovetail.data.generators import Source, find_generators, generator_states, set_generator_states
from dovetail.data.streams.indexed import IndexedStream
from dovetail.data.streams.protocol import Stream
from dovetail.data.streams.sharded import ShardedStream
from dovetail.data.workers import seed_generators
from dovetail.errors import DataError
from dovetail.runtime.seeds import derive_seed


class StreamLoader:
    """Batches of the samples of a stream.

    Each process and each of its workers reads a part of the stream and forms batches from it. A state holds the
    position of every part. If it was written by another number of processes or workers, what is left is divided again.

    Args:
        stream: The whole stream; this object never reads it, but only its parts.
        batch_size: Samples per batch; None means that the stream yields batches.
        num_workers: The number of worker processes.
        collate_fn: Converts a list of samples (a batch, if `batch_size` is None) to a batch; None means torch's way.
        drop_last: Whether a reader leaves out its last batch if it is not full. These samples are then not used.
        pin_memory: Whether batches are in pinned memory if there is an accelerator.
        prefetch_factor: Batches that each worker reads ahead; None means torch's default.
        note: A sentence about what a resumed run cannot repeat or reads again; None if there is nothing to report.

    Example:
        >>> from dovetail.data.streams import IndexedStream
        >>> stream = IndexedStream(lambda index: index, lambda epoch: range(5))
        >>> loader = StreamLoader(stream, batch_size=2)
        >>> state = next((loader.state_dict() for batch in loader))
        >>> loader.load_state_dict(state)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4]]
    """

    def __init__(
        self,
        stream: Stream[Any],
        batch_size: int | None = 1,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        note: str | None = None,
    ) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.collate_fn = collate_fn or (default_convert if batch_size is None else default_collate)
        self.drop_last = drop_last
        self.note = note
        self._options: dict[str, Any] = {"pin_memory": pin_memory and torch.accelerator.is_available()}
        if num_workers:
            self._options["prefetch_factor"] = prefetch_factor
        self._rank, self._world, self._seed, self._epoch = 0, 1, 0, 0
        # The state to continue from; None means a new epoch.
        self._restored: Mapping[str, Any] | None = None
        # The readers of the running pass, and the worker that reads the next batch.
        self._readers: list[_ReaderState] = []
        self._next_role = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, or of the running one."""
        return self._epoch

    def share(self, rank: int, world: int, seed: int) -> StreamLoader:
        """Return the loader of one of several processes.

        Args:
            rank: The rank of the process.
            world: The number of processes.
            seed: Seeds the random numbers that samples draw in workers, together with the epoch and the batch.
        """
        part = copy.copy(self)
        part._rank, part._world, part._seed = rank, world, seed
        part._restored, part._readers, part._next_role = None, [], 0
        return part

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the start of an epoch."""
        self._epoch, self._restored, self._readers = epoch, None, []

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every part that this process reads, after the last batch that was returned."""
        if self._restored is not None:
            return dict(self._restored)
        readers = self._readers or self._first_readers()
        own = {"readers": [it.state() for it in readers], "next": self._next_role}
        return {"epoch": self._epoch, "world": self._world, "processes": [own]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the samples that the loader of `state` had not returned yet.

        Args:
            state: The result of `state_dict` of this process, or of all processes, joined by `join_states`.

        Raises:
            DataError: The state is of another number of processes, and does not hold the positions of all of them.
        """
        if len(state["processes"]) not in {1, state["world"]} or (
            state["world"] != self._world and len(state["processes"]) != state["world"]
        ):
            raise DataError(
                f"the checkpoint holds the positions of {len(state['processes'])} of {state['world']} processes in the "
                f"stream: continue with {state['world']} processes"
            )
        self._epoch, self._restored = state["epoch"], state

    def __iter__(self) -> Iterator[Any]:
        if self._restored is None:
            self._readers, self._next_role = self._first_readers(), 0
        else:
            state, self._restored = self._restored, None
            self._restore_readers(state)
        return self._worker_batches() if self.num_workers else self._own_batches()

    # Which process and worker reads which part

    @property
    def _num_readers(self) -> int:
        return max(1, self.num_workers)

    def _first_readers(self) -> list[_ReaderState]:
        """Return the readers of this process at the start of an epoch."""
        if isinstance(self.stream, _HasEpoch):
            self.stream.set_epoch(self._epoch)
        first, world = self._rank * self._num_readers, self._world * self._num_readers
        return [self._reader([self.stream.split(first + role, world)]) for role in range(self._num_readers)]

    def _restore_readers(self, state: Mapping[str, Any]) -> None:
        """Set the readers to their positions in a state, or divide what is left among other readers."""
        processes = state["processes"]
        if state["world"] == self._world:
            own = processes[0] if len(processes) == 1 else processes[self._rank]
            if len(own["readers"]) == self._num_readers:
                self._readers = [
                    self._reader([self._part(it) for it in each["parts"]], each["number"], each["generators"])
                    for each in own["readers"]
                ]
                self._next_role = own["next"]
                return
            processes, first, world = [own], 0, self._num_readers
        else:
            first, world = self._rank * self._num_readers, self._world * self._num_readers
        parts = [part for process in processes for reader in process["readers"] for part in reader["parts"]]
        # Numbers seed the samples of a batch, so that batches of one epoch must not have the same number twice.
        number = max(reader["number"] for process in processes for reader in process["readers"])
        roles = range(self._num_readers)
        self._readers = [self._reader(self._divided(parts, first + role, world), number) for role in roles]
        self._next_role = 0

    def _reader(
        self, streams: Sequence[Stream[Any]], number: int = 0, generators: Mapping[str, Any] | None = None
    ) -> _ReaderState:
        # The objects of libraries are not searched: their positions determine what they yield.
        searches = not isinstance(self.stream, (IndexedStream, ShardedStream))
        return _ReaderState(deque(streams), number, generators or {}, self.collate_fn, searches)

    def _divided(self, parts: Sequence[Mapping[str, Any]], rank: int, world: int) -> list[Stream[Any]]:
        """Return whole parts, and one of `world` pieces of each part that is left."""
        num_whole = len(parts) // world * world
        whole = [self._part(part) for part in parts[rank:num_whole:world]]
        return [*whole, *(self._part(part).split(rank, world) for part in parts[num_whole:])]

    def _part(self, state: Mapping[str, Any]) -> Stream[Any]:
        part = self.stream.split(0, 1)
        part.load_state_dict(state)
        return part

    # Batches

    def _own_batches(self) -> Iterator[Any]:
        (reader,) = self._readers
        reader.restore_generators()
        for batch in self._form(reader.streams):
            reader.number += 1
            yield batch

    def _worker_batches(self) -> Iterator[Any]:
        readers, offset = self._readers, self._next_role
        data = _WorkerData(self._form, readers, offset, (self._seed, self._epoch, self._rank))
        options = {name: it for name, it in self._options.items() if it is not None}
        batches: Any = torch_data.DataLoader(
            data, None, num_workers=self.num_workers, collate_fn=_unchanged, generator=torch.Generator(), **options
        )
        for stamped in batches:
            readers[stamped.role] = stamped.reader
            self._next_role = (stamped.role + 1) % self.num_workers
            yield stamped.batch

    def _form(self, streams: deque[Stream[Any]]) -> Iterator[Any]:
        """Yield batches of streams that are read one after another; finished streams are removed."""
        samples = _read(streams)
        if self.batch_size is None:
            yield from map(self.collate_fn, samples)
            return
        while chosen := list(islice(samples, self.batch_size)):
            if len(chosen) < self.batch_size and self.drop_last:
                return
            yield self.collate_fn(chosen)

    def __getstate__(self) -> dict[str, Any]:
        # Open files cannot be sent to another process, which starts at the start of an epoch or loads a state.
        return {**vars(self), "_readers": []}


def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of all processes from the state of each, in the order of their ranks."""
    return {**states[0], "processes": [process for state in states for process in state["processes"]]}


@dataclass(slots=True)
class _ReaderState:
    """What one process or worker reads.

    Attributes:
        streams: The parts that are read one after another.
        number: The number of batches that were formed.
        restored: States of generators that are set before the first sample is read.
        collate_fn: The function that forms batches, which may contain a generator.
        searches: Whether the streams may contain generators.
    """

    streams: deque[Stream[Any]]
    number: int
    restored: Mapping[str, Any]
    collate_fn: Any
    searches: bool

    def state(self) -> dict[str, Any]:
        generators = self.restored or generator_states(self._generators())
        return {"parts": [it.state_dict() for it in self.streams], "number": self.number, "generators": generators}

    def restore_generators(self) -> None:
        """Set the generators in the process that reads: parts may share a generator before they are sent to workers."""
        set_generator_states(self._generators(), self.restored)
        self.restored = {}

    def _generators(self) -> dict[str, Source]:
        stream = self.streams[0] if self.searches and self.streams else None
        return find_generators(stream=stream, collate_fn=self.collate_fn)


@dataclass(slots=True)
class _ReportedState:
    """The state that a worker reported with its last batch."""

    reported: dict[str, Any]

    def state(self) -> dict[str, Any]:
        return self.reported


@dataclass(slots=True)
class _Stamped:
    """A batch, the role of the worker that read it, and the state of this worker."""

    batch: Any
    role: int
    reader: _ReportedState

    def pin_memory(self) -> _Stamped:
        """Pin the batch. Torch calls this method for objects of unknown classes."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return _Stamped(pin_memory(self.batch), self.role, self.reader)  # type: ignore[no-untyped-call]  # torch


class _WorkerData(IterableDataset[Any]):
    """The batches of one worker, with the state of the worker after each of them.

    Torch gives the first batch to worker 0, so in a continued pass worker 0 takes the role of the worker whose turn
    it is.
    """

    def __init__(self, form: Any, readers: Sequence[Any], offset: int, seeds: tuple[int, int, int]) -> None:
        self._form = form
        self._readers = readers
        self._offset = offset
        self._seeds = seeds

    def __iter__(self) -> Iterator[_Stamped]:
        worker = torch_data.get_worker_info()
        assert worker is not None, "the loader reads its own part without workers"
        role = (worker.id + self._offset) % len(self._readers)
        # Otherwise libraries would divide the part of this worker again.
        torch_worker._worker_info = None
        reader: _ReaderState = self._readers[role]
        reader.restore_generators()
        batches = self._form(reader.streams)
        for number in count(reader.number):
            seed, epoch, rank = self._seeds
            seed_generators(derive_seed(seed, "stream", epoch, rank, role, number))
            batch = next(batches, _END)
            if batch is _END:
                return
            reader.number = number + 1
            yield _Stamped(batch, role, _ReportedState(reader.state()))


@runtime_checkable
class _HasEpoch(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


_END = object()


def _read(streams: deque[Stream[Any]]) -> Iterator[Any]:
    while streams:
        yield from streams[0]
        streams.popleft()


def _unchanged(batch: Any) -> Any:
    return batch
