"""Random states of a loader's worker processes: recorded with every batch, restored when a pass is resumed.

Torch seeds a worker when it starts. A run that resumes in the middle of an epoch starts new workers, so their
generators must be set to the states that the workers of the first run had reached.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data as torch_data
from torch.utils.data._utils.worker import _generate_state
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dovetail.data.generators import (
    Source,
    find_generators,
    generator_states,
    global_states,
    set_generator_states,
    set_global_states,
)
from dovetail.errors import add_note

State = dict[str, Any]


class WorkerStates:
    """The random states of the workers of one loader at the last returned batch.

    Workers are identified by their *role*: role r reads the batches r, r + n, r + 2n, … of a pass. When a pass is
    resumed at batch k, torch gives that batch to worker 0, which therefore takes the role k modulo n.

    Args:
        num_workers: The number of worker processes.
        keeps_global: False if the global generators are seeded for every batch, so that their states are not recorded.

    Attributes:
        states: The state of each role; None if torch's seed still applies.
        next_role: The role that reads the next batch.
    """

    def __init__(self, num_workers: int, keeps_global: bool = True) -> None:
        self.states: list[State | None] = [None] * num_workers
        self.next_role = 0
        self._keeps_global = keeps_global
        self._offset = 0

    @property
    def is_rotated(self) -> bool:
        """Whether the role of worker 0 is not 0."""
        return self._offset != 0

    def start(self, states: Sequence[State | None], first_role: int) -> None:
        """Set the initial states of the next workers, and the role of worker 0."""
        self.states, self._offset, self.next_role = list(states), first_role, first_role

    @contextmanager
    def installed(self, loader: torch_data.DataLoader[Any]) -> Iterator[None]:
        """Make workers that `loader` starts in the block restore their states, and send them with every batch."""
        collate_fn, worker_init_fn = loader.collate_fn, loader.worker_init_fn
        stamping = _Stamping(collate_fn, self._keeps_global)
        # Torch passes these two functions to the workers when it starts them.
        loader.collate_fn = stamping
        context = loader.multiprocessing_context or multiprocessing
        parent = None if context.get_start_method() == "forkserver" else os.getpid()
        loader.worker_init_fn = _Initialization(worker_init_fn, stamping, list(self.states), self._offset, parent)
        try:
            yield
        finally:
            loader.collate_fn, loader.worker_init_fn = collate_fn, worker_init_fn

    def unstamped(self, batches: Iterable[Any], first: int = 0) -> Iterator[Any]:
        """Yield the batches of workers that were started in `installed`, and record their states.

        Args:
            batches: The batches with the states of their workers.
            first: The number of the first batch in its pass, from 0, for the message of an error.
        """
        for stamped in _locating_errors(batches, first):
            if not isinstance(stamped, _Stamped):
                # The loader started its workers before `installed`.
                yield stamped
                continue
            self.states[stamped.role] = {**(self.states[stamped.role] or {}), **stamped.changes}
            self.next_role = (stamped.role + 1) % len(self.states)
            if stamped.lost:
                warnings.warn(
                    f"the data workers do not have {', '.join(stamped.lost)}, whose random state the checkpoint holds: "
                    "create it in the constructor or in worker_init_fn, not when the first sample is read; the rest of "
                    "the epoch may differ from the uninterrupted run",
                    UserWarning,
                    stacklevel=2,
                )
            yield stamped.batch


def _locating_errors(batches: Iterable[Any], first: int) -> Iterator[Any]:
    """Yield the batches of workers; an error in a worker gets a note with worker, batch and line."""
    number = first
    try:
        for number, batch in enumerate(batches, start=first + 1):  # noqa: B007  # read when the next batch fails
            yield batch
    except Exception as error:
        text = "\n".join(map(str, error.args))
        if (worker := _WORKER.search(text)) is not None:
            # Torch sends the traceback as text, in which the last line of the user's code is hard to find.
            places = [found for found in _PLACE.finditer(text) if _TORCH not in found["file"]]
            if places:
                last = places[-1]
                add_note(
                    error,
                    f"raised in data worker {worker[1]}, which read batch {number + 1} of the pass: {last['file']}, "
                    f"line {last['line']}, in {last['name']}; num_workers=0 reads the data in this process, where a "
                    "debugger works",
                )
            _stop_workers(batches)
        raise


def _stop_workers(batches: Any) -> None:
    """Stop the workers of an iterator that raised an error.

    Otherwise Python's garbage collector does it, because the traceback and the iterator refer to each other. It first
    closes the queues by which torch stops workers, so that torch waits 5 seconds for each of them.
    """
    if isinstance(batches, _MultiProcessingDataLoaderIter) and not batches._persistent_workers:
        batches._shutdown_workers()


# A line of a traceback, and the folder of torch, whose lines call the user's dataset.
_WORKER = re.compile(r"in DataLoader worker process (\d+)")
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_TORCH = str(Path(torch.__file__).parent)


@dataclass(slots=True)
class _Stamped:
    """A batch, the role of the worker that read it, and the changes of that worker's random state."""

    batch: Any
    role: int
    changes: State
    lost: list[str]

    def pin_memory(self) -> _Stamped:
        """Pin the batch. Torch calls this method for objects of unknown classes."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return _Stamped(pin_memory(self.batch), self.role, self.changes, self.lost)  # type: ignore[no-untyped-call]  # torch


class _Stamping:
    """A `collate_fn` that adds the worker's random state to each batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], keeps_global: bool) -> None:
        self.lost: list[str] = []
        self._collate_fn = collate_fn
        self._keeps_global = keeps_global
        self._sent: State = {}
        self._sources: dict[str, Source] | None = None

    def __call__(self, samples: Any) -> _Stamped:
        batch = self._collate_fn(samples)
        if self._sources is None:
            # Only after the first batch, because a dataset may create its generators when it is first read.
            self._sources = self.find_generators()
        state = global_states() if self._keeps_global else {}
        state |= {_PRIVATE + path: it for path, it in generator_states(self._sources).items()}
        # Only changes are sent: the state of Python's or NumPy's generator alone has 2.5 kB.
        changes = {name: it for name, it in state.items() if self._sent.get(name) != it}
        self._sent = state
        lost, self.lost = self.lost, []
        return _Stamped(batch, _worker().id, changes, lost)

    def restore(self, state: State) -> None:
        """Set the generators of this worker, and record the paths without a generator."""
        set_global_states(state)
        private = {name.removeprefix(_PRIVATE): it for name, it in state.items() if name.startswith(_PRIVATE)}
        self.lost = set_generator_states(self.find_generators(), private)

    def find_generators(self) -> dict[str, Source]:
        """Return the generators of this worker's dataset and of its `collate_fn`."""
        return find_generators(dataset=_worker().dataset, collate_fn=self._collate_fn)


@dataclass
class _Initialization:
    """Initialises a worker: sets its role and seed, calls the user's `worker_init_fn`, restores its random state.

    It ends the worker if its parent has ended. Torch's workers notice this only if it happens later, and would wait for
    their first batch forever.
    """

    worker_init_fn: Callable[[int], Any] | None
    # The same object as the worker's `collate_fn`; pickling both together preserves this.
    stamping: _Stamping
    states: list[State | None]
    offset: int
    # The process that starts the worker; None if a fork server does.
    parent: int | None

    def __call__(self, worker_id: int) -> None:
        role = (worker_id + self.offset) % len(self.states)
        if role != worker_id:
            _take_role(role)
        if self.worker_init_fn is not None:
            self.worker_init_fn(role)
        # After the user's `worker_init_fn`, which may seed the generators.
        state = self.states[role]
        if state is not None:
            self.stamping.restore(state)
        if self.parent is not None and os.getppid() != self.parent:
            os._exit(1)


def seed_generators(seed: int) -> None:
    """Seed the global generators from which samples draw on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


_PRIVATE = "private."


def _take_role(role: int) -> None:
    """Give this worker the number and the seed with which torch would have started worker `role`."""
    worker = _worker()
    # Torch gives worker i the seed `base_seed + i`.
    base_seed = worker.seed - worker.id
    # Torch's class forbids assignments, but datasets may derive seeds from these two attributes.
    object.__setattr__(worker, "id", role)
    object.__setattr__(worker, "seed", base_seed + role)
    random.seed(base_seed + role)
    torch.default_generator.manual_seed(base_seed + role)
    np.random.seed(_generate_state(base_seed, role))  # type: ignore[no-untyped-call]  # torch has no types here


def _worker() -> Any:
    worker = torch_data.get_worker_info()
    assert worker is not None, "only workers restore and send their states"
    return worker
