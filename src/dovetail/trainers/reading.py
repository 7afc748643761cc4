"""Resumable passes over a data loader: continued in the middle, also in another process, with the same batches."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.utils.data as torch_data
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from dovetail.data import DataLoader, StreamLoader, is_shared_already, iterate_from
from dovetail.data.generators import find_generators, generator_states, set_generator_states
from dovetail.data.sharing import is_torchdata_loader
from dovetail.data.slicing import rows_in_memory
from dovetail.data.streams.loader import join_states
from dovetail.data.streams.stateful import StatefulLoaderStream
from dovetail.data.workers import WorkerStates
from dovetail.errors import DataError
from dovetail.trainers.context import Stateful
from dovetail.trainers.device_copies import END, DeviceCopier, draws_nothing
from dovetail.trainers.randomness import rng_state, set_rng_state


class Reader:
    """Reads the passes of one stage, and stores the state to continue the running one.

    A pass depends on many random generators: the global ones, the generators that loader, sampler, dataset and
    transforms hold, and the generators of the worker processes. When a pass is continued, the generators are set to
    their states at its start, the order is drawn again, finished batches are skipped, and the generators are set to
    their states at the moment of the checkpoint.

    A plain `DataLoader` of torch is read through a copy of this library's class, which yields the same batches from the
    same random numbers and records the random states of its workers.

    Args:
        resumable: True if a pass may be continued in its middle, as in training. False for passes that are always
            read from their start, and after which the global generators are restored.
    """

    def __init__(self, resumable: bool = True) -> None:
        self._resumable = resumable
        self._copies: weakref.WeakKeyDictionary[Any, DataLoader[Any]] = weakref.WeakKeyDictionary()
        self._loader: Any = None
        # The generators' states at the start of the running pass.
        self._start: dict[str, Any] | None = None
        # The state of a checkpoint, until the next pass starts.
        self._restored: dict[str, Any] | None = None
        # The worker states of a loader that has a `state_dict` without the random states of its workers.
        self._workers: WorkerStates | None = None
        self._checked: weakref.ref[Any] | None = None
        # The state before the last batch was read, if the caller reads ahead.
        self._before_ahead: dict[str, Any] | None = None
        # The state of this library's loader before the last batch was read, if its copy was started ahead.
        self._before_copy: dict[str, Any] | None = None

    def own(self, loader: Any) -> Any:
        """Return the loader from which batches are read: a copy of a torch loader, else the loader itself."""
        if not isinstance(loader, torch_data.DataLoader) or isinstance(loader, DataLoader):
            return loader
        # A class that overrides `__iter__` must be iterated by its own method.
        if type(loader).__iter__ is not torch_data.DataLoader.__iter__ and not is_torchdata_loader(loader):
            return loader
        copy = self._copies.get(loader)
        if copy is None:
            copy = self._copies[loader] = DataLoader.from_torch(loader)
        return copy

    def batches(
        self, loader: Any, *, epoch: int, start: int, is_running: bool, reads_ahead: bool = False
    ) -> Iterable[Any]:
        """Return the batches of a pass, or the rest of one.

        Args:
            loader: The result of `own`.
            epoch: The number of the pass.
            start: The number of batches to skip.
            is_running: True if the pass was started before: by this reader, or by the reader of the restored state.
            reads_ahead: True if the caller reads one batch ahead, to detect the last one.
        """
        state, self._restored = self._restored, None
        # Checkpoints of earlier versions do not have `is_running`.
        if state is not None and state.get("is_running", is_running) != is_running:
            # The counters were reset since then: this is a new run, or the pass of a trial.
            state = None
        if is_running and state is None:
            state = self.state_dict(loader, is_running=True) if loader is self._loader else self._start
        self._loader, self._before_ahead, self._before_copy = loader, None, None
        batches = self._batches(loader, epoch, start, is_running, state)
        return self._with_state_before(batches) if reads_ahead else batches

    def _batches(
        self, loader: Any, epoch: int, start: int, is_running: bool, state: dict[str, Any] | None
    ) -> Iterable[Any]:
        """Return the batches of a new pass, or the rest of the pass that `state` belongs to."""
        if isinstance(loader, StreamLoader):
            return self._stream_batches(loader, epoch, start, state if is_running else None)
        _set_epoch(loader, epoch)
        if state is None:
            self._start = self._sources(loader) if self._resumable else None
            fresh: Iterable[Any] = self._stateful_batches(loader, None, None) if keeps_place(loader) else loader
            return fresh
        # The random state that training continues with. Drawing the order again, below, changes the global generators.
        now = rng_state()
        if is_running and state["rng"] is not None:
            set_rng_state(state["rng"])
        _set_sources(loader, state)
        if isinstance(loader, DataLoader):
            _load(loader, state)
            # The trainer's position counts: of several processes each has its own.
            _set_epoch(loader, epoch)
        self._start = state if is_running else self._sources(loader)
        batches: Iterable[Any]
        if keeps_place(loader):
            batches = self._stateful_batches(loader, state, now)
        else:
            batches = iterate_from(loader, start) if is_running else loader
        # After the order was drawn: the generators of the dataset continue from the last sample that was read.
        if state.get("private_now"):
            set_generator_states(_private_sources(loader), state["private_now"])
        if is_running:
            if state.get("ahead") is not None:
                # One batch was read ahead, before the last step drew its random numbers.
                set_rng_state(state["ahead"])
                batches = _read_first(batches)
            set_rng_state(now)
        return batches

    def _stream_batches(
        self, loader: StreamLoader, epoch: int, start: int, state: dict[str, Any] | None
    ) -> Iterable[Any]:
        """Return the batches of a stream: of a new pass, or the samples that no process has used in the running one."""
        loader.set_epoch(epoch)
        self._start = None
        if state is None:
            return loader
        saved = state.get("stream")
        if saved is None and state["loader"] is not None and isinstance(loader.stream, StatefulLoaderStream):
            # One process has read this loader before, without dividing it.
            saved = _undivided(loader, start, state["loader"])
        if saved is None:
            raise DataError(
                "the checkpoint was written within an epoch of other data than this stream: continue with the same "
                "data, or start a new run"
            )
        loader.load_state_dict(saved)
        batches = iter(loader)
        if state.get("ahead") is not None:
            now = rng_state()
            set_rng_state(state["ahead"])
            batches = _read_first(batches)
            set_rng_state(now)
        return batches

    @property
    def has_drawn_ahead(self) -> bool:
        """Whether the restored state contains batches that a sampler of the user has drawn for workers."""
        workers = ((self._restored or {}).get("reader") or {}).get("workers") or {}
        return bool(workers.get("pending"))

    @property
    def reads_stream(self) -> bool:
        """Whether the state that the next pass continues is the position of a divided stream."""
        return self._restored is not None and self._restored.get("stream") is not None

    def state_dict(self, loader: Any, *, is_running: bool) -> dict[str, Any]:
        """Return the state from which the rest of the running pass, or the whole next pass, can be read.

        Args:
            loader: The result of `own`, for a reader that has read nothing yet; None if there is none.
            is_running: True if a pass is running.
        """
        if self._restored is not None:
            # Nothing was read since the state was restored, so the loader, if it exists, is not at that position.
            return self._restored
        # The batch that was read ahead is not trained yet, so a resumed run must read it again.
        if is_running and self._before_ahead is not None:
            return self._before_ahead
        loader = self._loader if self._loader is not None else loader
        if isinstance(loader, StreamLoader):
            # A position needs no random state: nothing is read again.
            empty = dict.fromkeys(("rng", "generator", "sampler", "loader", "ahead"))
            return {**empty, "is_running": is_running, "stream": loader.state_dict() if is_running else None}
        state = {
            **((self._start if is_running else None) or self._sources(loader)),
            "is_running": is_running,
            "loader": None,
            "ahead": None,
        }
        # A resumed pass skips finished samples without reading them, so it cannot recompute these states.
        if is_running and _reads_by_index(loader):
            state["private_now"] = generator_states(_private_sources(loader))
        if isinstance(loader, DataLoader):
            # The batch whose copy was started is not trained yet, so a resumed run must read it again.
            is_ahead = is_running and self._before_copy is not None
            state["reader"] = self._before_copy if is_ahead else loader.state_dict()
            state["share"] = [loader.num_replicas, loader.rank]
        elif keeps_place(loader):
            now = rng_state()
            # Some loaders start their iteration in `state_dict`, which draws random numbers.
            state["loader"] = loader.state_dict()
            set_rng_state(now)
            state["workers"] = list(self._workers.states) if is_running and self._workers is not None else None
        return state

    def has_state(self, loader: Any) -> bool:
        """Return whether passes over `loader` depend on anything besides the loader's own seed."""
        if self._restored is not None:
            return True
        if isinstance(loader, StreamLoader):
            return False
        return loader is not None and not (
            isinstance(loader, DataLoader) and loader.is_seeded and not loader.num_workers
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next pass at the position where `state_dict` was called.

        Raises:
            KeyError, TypeError, ValueError: The state does not have the form of `state_dict`. Most of it is used
                only when the next pass starts, so its form is checked now.
        """
        _check_form(state)
        self._start = self._restored = dict(state)

    def reset(self) -> None:
        """Forget the running pass and the restored state; the copies of loaders stay."""
        self._loader = self._start = self._restored = self._workers = self._before_ahead = self._before_copy = None

    def inexact(self, loader: Any) -> str | None:
        """Return why a run over `loader` may not resume exactly, or what it reads again; None if it was reported."""
        if self._checked is not None and self._checked() is loader:
            return None
        if isinstance(loader, StreamLoader):
            self._checked = weakref.ref(loader)
            return loader.note
        if isinstance(loader, torch_data.DataLoader):
            self._checked = weakref.ref(loader)
            return _inexact(loader)
        return None

    def __getstate__(self) -> dict[str, Any]:
        # Copies of loaders have worker processes, and weak references cannot be pickled.
        return {"_resumable": self._resumable, "_start": self._start, "_restored": self._restored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    def _sources(self, loader: Any) -> dict[str, Any]:
        """Return the state of everything that determines a new pass, except this library's loader."""
        if isinstance(loader, DataLoader) and loader.is_seeded:
            # Tensors in memory draw no random numbers.
            is_plain = type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate
            private = {} if is_plain else generator_states(_private_sources(loader))
            return {"rng": None, "generator": None, "sampler": None, "private": private}
        generator, sampler = getattr(loader, "generator", None), getattr(loader, "sampler", None)
        return {
            "rng": rng_state() if self._resumable else None,
            "generator": None if generator is None else generator.get_state(),
            "sampler": sampler.state_dict() if isinstance(sampler, Stateful) else None,
            "private": generator_states(_private_sources(loader, with_order=True)),
        }

    def copied_ahead(self, batches: Iterable[Any], copier: DeviceCopier) -> Iterable[Any]:
        """Return the batches of this reader's pass; while one is used, the next one is copied to the device.

        Batches are read one ahead only if this draws no random numbers of this process: otherwise the random numbers
        of a run would depend on its device.
        """
        return self._copied_ahead(batches, copier) if draws_nothing(self._loader) else batches

    def _copied_ahead(self, batches: Iterable[Any], copier: DeviceCopier) -> Iterator[Any]:
        iterator, loader = iter(batches), self._loader
        error: Exception | None = None
        following = copier.read(iterator)
        try:
            while following is not END:
                batch = following
                self._before_copy = loader.state_dict() if isinstance(loader, DataLoader) else None
                try:
                    following = copier.read(iterator)
                except Exception as failure:
                    # Raise it when the loop requests this batch.
                    error, following = failure, END
                yield batch
        finally:
            copier.forget(following)
        if error is not None:
            raise error

    def _with_state_before(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and keep the state before the last one: a caller that reads ahead has not used it."""
        iterator = iter(batches)
        while True:
            self._before_ahead = None
            self._before_ahead = {**self.state_dict(self._loader, is_running=True), "ahead": rng_state()}
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch

    def _stateful_batches(
        self, loader: Any, state: Mapping[str, Any] | None, now: Mapping[str, Any] | None
    ) -> Iterable[Any]:
        """Return the batches of a loader with its own position, from the position in `state`.

        Args:
            loader: The loader.
            state: The result of `state_dict`; None means a new pass.
            now: The state of the global generators to continue the pass with.
        """
        self._workers = None
        if not isinstance(loader, torch_data.DataLoader) or not loader.num_workers or loader.persistent_workers:
            _place(loader, state, now)
            return cast(Iterable[Any], loader)
        self._workers = WorkerStates(loader.num_workers)
        saved = None if state is None else state.get("workers")
        # A stream without a state is read again from its start, by workers that draw the same numbers again.
        reads_again = isinstance(loader.dataset, IterableDataset) and not isinstance(loader.dataset, Stateful)
        if saved is not None and len(saved) == loader.num_workers and not reads_again:
            self._workers.start(saved, 0)
        with self._workers.installed(loader):
            _place(loader, state, now)
            return self._workers.unstamped(iter(loader))


def _read_first(batches: Iterable[Any]) -> Iterator[Any]:
    """Return the same batches, after reading the first one."""
    iterator = iter(batches)
    return chain(list(islice(iterator, 1)), iterator)


def keeps_place(loader: Any) -> bool:
    """Return whether a user's loader has its own `state_dict`."""
    return not isinstance(loader, (DataLoader, StreamLoader)) and isinstance(loader, Stateful)


def join_positions(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of the first of several processes, with the positions of all of them in a stream."""
    streams = [state.get("stream") for state in states]
    return {**states[0], "stream": None if None in streams else join_states(cast("list[Any]", streams))}


def _undivided(loader: StreamLoader, num_batches: int, state: Any) -> dict[str, Any]:
    """Return the state of a divided stream from the state of its loader in a single process."""
    part = {"epoch": loader.epoch, "pieces": [[0, num_batches, 1, num_batches, state]]}
    process = {"readers": [{"parts": [part], "number": num_batches, "generators": {}}], "next": 0}
    return {"epoch": loader.epoch, "world": 1, "processes": [process]}


def _place(loader: Any, state: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Move a loader to its position in a state; random numbers that this draws are restored."""
    if state is None or now is None or state["loader"] is None:
        return
    loader.load_state_dict(state["loader"])
    # torchdata's loader starts its iteration here. Otherwise it would do so when the pass starts, and draw again.
    loader.state_dict()
    set_rng_state(now)


def _reads_by_index(loader: Any) -> bool:
    """Return whether samples are read in this process by index, so that skipped samples are not read."""
    is_torch = isinstance(loader, torch_data.DataLoader)
    return is_torch and not loader.num_workers and not isinstance(loader.dataset, IterableDataset)


def _set_epoch(loader: Any, epoch: int) -> None:
    if isinstance(loader, DataLoader):
        loader.set_epoch(epoch)
    elif is_shared_already(loader):
        # Otherwise every epoch would have the same order.
        loader.sampler.set_epoch(epoch)


def _set_sources(loader: Any, state: Mapping[str, Any]) -> None:
    """Restore the generators and samplers that determine the order of a pass; warn if one no longer exists."""
    if state["generator"] is not None and getattr(loader, "generator", None) is not None:
        loader.generator.set_state(state["generator"])
    if state["sampler"] is not None and isinstance(getattr(loader, "sampler", None), Stateful):
        loader.sampler.load_state_dict(state["sampler"])
    if state.get("private"):
        lost = set_generator_states(_private_sources(loader, with_order=True), state["private"])
        if lost:
            warnings.warn(
                f"the checkpoint holds the random state of {', '.join(lost)}, which the data does not have: the rest "
                "of the epoch may differ from the uninterrupted run",
                UserWarning,
                stacklevel=2,
            )


def _private_sources(loader: Any, *, with_order: bool = False) -> dict[str, Any]:
    """Return the generators inside the user's dataset and collation, and with `with_order` also inside the samplers."""
    if isinstance(loader, (list, tuple)):
        # Batches in memory draw no random numbers.
        return {}
    if not isinstance(loader, torch_data.DataLoader):
        return find_generators(loader=loader)
    roots: dict[str, Any] = {}
    if not isinstance(loader, DataLoader) or rows_in_memory(loader) is None:
        roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    if with_order:
        roots |= {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    return find_generators(**roots)


def _load(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Restore the state of this library's loader, if the state is of the same share of the batches."""
    if isinstance(loader.dataset, IterableDataset):
        _check_workers(loader, state)
    # With another number of processes, the trainer divides the rest of the epoch again.
    if state.get("reader") is None or list(state["share"]) != [loader.num_replicas, loader.rank]:
        return
    try:
        loader.load_state_dict(state["reader"])
    except DataError as error:
        warnings.warn(
            f"the training data is not read as in the checkpoint ({error}): the rest of the epoch differs from the "
            "uninterrupted run",
            UserWarning,
            stacklevel=2,
        )


def _check_workers(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Raise if another number of workers would read other samples of a stream than the ones that are left."""
    reader = state.get("reader")
    if reader is None or not reader["position"] or not reader.get("workers"):
        return
    saved = len(reader["workers"]["start"])
    if max(saved, 1) != max(loader.num_workers, 1):
        raise DataError(
            f"num_workers: the checkpoint was written within an epoch of a stream that {saved} workers divided, and "
            f"{loader.num_workers} workers would lose some samples and repeat others: expected num_workers={saved}, a "
            "checkpoint at the end of an epoch, or a dataset with the methods of dovetail.data.Stream"
        )


def _check_form(state: Mapping[str, Any]) -> None:
    """Raise if a state has a form that `Reader.state_dict` never returned, in this or an earlier version."""
    now = rng_state()
    for randomness in (state["rng"], state.get("ahead")):
        if randomness is not None:
            set_rng_state(randomness)
    set_rng_state(now)
    if missing := {"generator", "sampler", "loader"} - state.keys():
        raise KeyError(min(missing))
    _expect(_BYTES, "generator", state["generator"])
    for name in ("private", "private_now"):
        _expect(Mapping, name, state.get(name))
    _expect(list, "workers", state.get("workers"))
    _check_stream(state.get("stream"))
    reader = state.get("reader")
    if reader is None:
        return
    _expect(Mapping, "reader", reader)
    for name, kind in (("epoch", int), ("position", int), ("generators", list), ("workers", Mapping)):
        _expect(kind, f"reader.{name}", reader[name])
    if reader["position"] < 0:
        raise ValueError(f"reader.position: expected a number of batches, got {reader['position']}")
    for generator in reader["generators"]:
        _expect(_BYTES, "reader.generators", generator)
    for name in ("start", "now", "pending"):
        _expect(list, f"reader.workers.{name}", reader["workers"][name])
    for worker in (*reader["workers"]["start"], *reader["workers"]["now"], *(state.get("workers") or ())):
        _expect(Mapping, "workers", worker)
    _expect(int, "reader.workers.next", reader["workers"]["next"])
    if len(state["share"]) != 2 or not all(isinstance(number, int) for number in state["share"]):
        raise ValueError(f"share: expected two numbers, got {state['share']!r}")


def _check_stream(state: Any) -> None:
    _expect(Mapping, "stream", state)
    if state is None:
        return
    _expect(int, "stream.epoch", state["epoch"])
    _expect(int, "stream.world", state["world"])
    for process in state["processes"]:
        _expect(int, "stream.next", process["next"])
        for reader in process["readers"]:
            _expect(int, "stream.number", reader["number"])
            _expect(list, "stream.parts", reader["parts"])
            _expect(Mapping, "stream.generators", reader["generators"])


_BYTES = torch.Tensor


def _expect(kind: Any, name: str, value: Any) -> None:
    """Raise unless `value` is None or an instance of a kind."""
    is_right = isinstance(value, kind) and (kind is not _BYTES or value.dtype == torch.uint8)
    if value is not None and not is_right:
        wanted = "tensor of bytes" if kind is _BYTES else kind.__name__
        raise TypeError(f"{name}: expected a {wanted}, got {type(value).__name__}")


def _inexact(loader: torch_data.DataLoader[Any]) -> str | None:
    """Return why a resumed run over a loader may differ from an uninterrupted one, or None."""
    if not loader.num_workers or (isinstance(loader, DataLoader) and rows_in_memory(loader) is not None):
        return None
    name = type(loader).__name__
    if not loader.in_order:
        return f"{name}(in_order=False) returns batches in the order in which its workers finish them"
    if isinstance(loader, DataLoader):
        if loader.num_replicas > 1 and find_generators(dataset=loader.dataset, collate_fn=loader.collate_fn):
            return (
                "the dataset holds a random generator, whose states in the data workers of several processes are lost"
            )
        return None
    if loader.persistent_workers:
        return f"the random state of persistent workers of a {name} is not known; give persistent_workers=False"
    if getattr(loader, "snapshot_every_n_steps", 1) != 1:
        return f"{name}(snapshot_every_n_steps=1) is needed if samples draw random numbers in workers"
    return None
