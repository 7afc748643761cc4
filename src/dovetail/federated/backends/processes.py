"""Clients in processes of this machine that are started once.

The client goes to every worker once, pickled, through a pipe; its tensors and arrays lie in memory that all workers
have, and that none can change for another. In a round, what several tasks have in common (the weights, and what an
algorithm sends to everybody) is written to shared memory once and read by every worker once. What belongs to a single
client, its state and its answer, goes through blocks of memory that the server and one worker share: two in each
direction, in turns, since the next client is there before the answer of the last one was read.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from dovetail.errors import ConfigError
from dovetail.federated.backends.base import Work, Worker
from dovetail.federated.backends.nursery import Nursery, nursery
from dovetail.federated.backends.parcels import Block, Parcel, Place, opened, packed
from dovetail.federated.backends.pool import Lost, News, Pool, Seat, WorkerError
from dovetail.federated.backends.sequential import attempted, fault
from dovetail.federated.messages import Weights
from dovetail.trainers.interruption import listening
from dovetail.trainers.relay import arithmetic, described, rebuilt, set_arithmetic, share_of_threads

__all__ = ["Process", "live", "num_cores"]

# Seconds that a worker has to leave by itself when there is nothing to do any more.
_GRACE = 2.0


@dataclass(eq=False, kw_only=True)
class _ProcessSeat(Seat):
    """A worker: who ends it, what it is spoken to through, and the blocks for what it gets and what it answers.

    Those that come next are in front.
    """

    nursery: Nursery
    pid: int
    connection: Connection
    inboxes: deque[Block]
    outboxes: deque[Block]
    exit_code: int | None = None


class Process(Pool[_ProcessSeat]):
    """Runs clients in processes that are started once, each with its share of the cores.

    Answers equal those of `Sequential` bit for bit if that has as many threads. A client that ends its process, or
    takes longer than `timeout`, is left out of its round, and another process takes the place.

    Args:
        num_workers: How many processes; None for one per core.
        timeout: Seconds that a client has; None for no limit.

    Example:
        >>> Process(num_workers=2).num_workers
        2
    """

    ahead = 1

    def __init__(self, num_workers: int | None = None, timeout: float | None = None) -> None:
        super().__init__(num_workers, timeout)
        self._blocks: tuple[Block, ...] = ()
        self._parcels: list[Parcel] = []
        self._round = 0

    def close(self) -> None:
        """End all workers, and let go of the memory."""
        # All of them are told first, so that they leave at the same time.
        for seat in self._seats:
            seat.connection.close()
        super().close()
        for block in self._blocks:
            block.close()
        self._blocks, self._parcels = (), []

    # ------------------------------------------------------------------ what a pool asks for

    def _open(self, worker: Worker) -> None:
        try:
            cargo = packed(worker)
        except Exception as error:
            raise ConfigError(f"the client or its data cannot be sent to other processes: {error}") from error
        self._blocks = self._cargo, self._shared = Block(), Block()
        self._message = pickle.dumps((cargo.content, self._cargo.write(cargo.bulk)))

    def _size(self) -> int:
        return self.num_workers or num_cores()

    def _begin(self) -> _ProcessSeat:
        ours, theirs = socket.socketpair()
        inboxes, outboxes = deque([Block(), Block()]), deque([Block(), Block()])
        with ours, theirs:
            blocks = (self._cargo, self._shared, *inboxes, *outboxes)
            descriptors = [theirs.fileno(), *(block.descriptor for block in blocks)]
            home = nursery()
            try:
                pid = home.begin(descriptors)
            except OSError as error:
                raise WorkerError("workers cannot be started: the process that they are forked from died") from error
            connection = Connection(ours.detach())
        seat = _ProcessSeat(nursery=home, pid=pid, connection=connection, inboxes=inboxes, outboxes=outboxes)
        # One that dies while it is told will be heard of.
        with suppress(OSError):
            connection.send_bytes(json.dumps(_circumstances(self._size())).encode())
            connection.send_bytes(self._message)
        return seat

    def _pack(self, work: Sequence[Work]) -> None:
        self._round += 1
        # Weights that go to several clients are packed once. By identity: all of them stay alive in `work`.
        times = Counter(id(task.weights) for task, _ in work)
        several = {id(task.weights): task.weights for task, _ in work if times[id(task.weights)] > 1}
        numbers = {each: number for number, each in enumerate(several)}
        try:
            weights = packed(list(several.values()))
            self._parcels = [packed(each, numbers) for each in work]
        except Exception as error:
            raise ConfigError(f"a task or a client's state cannot be sent to other processes: {error}") from error
        # What else is common is found by where it lies.
        self._keys = [[_key(part) for part in parcel.bulk] for parcel in self._parcels]
        found = Counter(key for keys in self._keys for key in keys)
        common = {
            key: part
            for parcel, keys in zip(self._parcels, self._keys, strict=True)
            for key, part in zip(keys, parcel.bulk, strict=True)
            if found[key] > 1
        }
        first = [memoryview(weights.content), *weights.bulk]
        # Nobody reads here now: workers have nothing to do between rounds.
        places = self._shared.write([*first, *common.values()])
        self._weights, self._common = places[: len(first)], dict(zip(common, places[len(first) :], strict=True))

    def _give(self, seat: _ProcessSeat, position: int) -> bool:
        parcel = self._parcels[position]
        shared = [self._common.get(key) for key in self._keys[position]]
        inbox = _next(seat.inboxes)
        own = iter(inbox.write([it for it, place in zip(parcel.bulk, shared, strict=True) if not place]))
        places = [(place is not None, place or next(own)) for place in shared]
        letter = pickle.dumps((self._round, self._weights, parcel.content, places))
        # A worker that is at work reads nothing. So what goes through the pipe must always fit in: where the letter is.
        where = inbox.append(memoryview(letter))
        try:
            seat.connection.send_bytes(pickle.dumps(where))
        except OSError:
            return False
        return True

    def _listen(self, seats: Sequence[_ProcessSeat], timeout: float | None) -> Iterator[tuple[_ProcessSeat, News]]:
        by_connection: dict[Any, _ProcessSeat] = {seat.connection: seat for seat in seats}
        for connection in wait(by_connection, timeout):
            seat = by_connection[connection]
            try:
                content, places = pickle.loads(seat.connection.recv_bytes())  # noqa: S301 - our own worker's
            except (EOFError, OSError):
                self._leave(seat, _GRACE)
                yield seat, Lost(_ending(seat.exit_code))
                continue
            news = opened(content, _next(seat.outboxes).read_all(places))
            if isinstance(news, Mapping):
                error = rebuilt(news)
                raise ConfigError(f"the client cannot be received by another process: {error}") from error
            yield seat, news

    def _end(self, seat: _ProcessSeat) -> None:
        self._leave(seat, _GRACE if seat.is_ready and not seat.given else 0.0)
        for block in (*seat.inboxes, *seat.outboxes):
            block.close()

    @staticmethod
    def _leave(seat: _ProcessSeat, grace: float) -> None:
        if seat.exit_code is None:
            seat.connection.close()
            # A nursery that is dead was killed, and all its workers with it.
            seat.exit_code = -signal.SIGKILL
            with suppress(OSError):
                seat.exit_code = seat.nursery.end(seat.pid, grace)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _circumstances(num_workers: int) -> dict[str, Any]:
    return {
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "arithmetic": arithmetic(),
        "num_threads": share_of_threads(num_workers),
    }


def _key(part: memoryview) -> tuple[int, int]:
    return np.asarray(part).__array_interface__["data"][0], part.nbytes


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (the system does so when memory is short)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with exit code {exit_code}"


# ------------------------------------------------------------------ in a worker


def live(descriptors: Sequence[int]) -> None:
    """Be a worker, from the first message to the last.

    Args:
        descriptors: Of the connection to the server, and of the blocks of the client, of rounds, two of what this
            worker gets, and two of what it answers.
    """
    connection = Connection(descriptors[0])
    cargo, shared, *turns = map(Block, descriptors[1:])
    inboxes, outboxes = deque(turns[:2]), deque(turns[2:])

    def answer(parcel: Parcel) -> None:
        connection.send_bytes(pickle.dumps((parcel.content, _next(outboxes).write(parcel.bulk))))

    with suppress(EOFError, ConnectionError), listening():
        _settle(json.loads(connection.recv_bytes()))
        try:
            content, places = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own server's
            memory = cargo.mapped()
            worker: Worker = opened(content, [memory[start : start + length] for start, length in places])
        except Exception as error:
            answer(packed(described(error)))
            return
        answer(packed("ready"))
        now, known = 0, dict[Place, memoryview]()
        weights: list[Weights] = []
        while True:
            where = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own server's
            inbox = _next(inboxes)
            number, first, content, marked = pickle.loads(inbox.read(where))  # noqa: S301 - our own server's
            if number != now:
                now, known = number, {}
                content_of_weights, *bulk = shared.read_all(first)
                weights = opened(bytes(content_of_weights), bulk)
            bulk = [_read(place, it, known, shared, inbox) for it, place in marked]
            work: Work = opened(content, bulk, weights)
            outcome = attempted(worker, work)
            try:
                parcel = packed(outcome)
            except Exception as error:
                parcel = packed(fault(work[0], error))
            answer(parcel)


def _next(turns: deque[Block]) -> Block:
    turns.rotate(-1)
    return turns[-1]


def _read(place: Place, is_shared: bool, known: dict[Place, memoryview], shared: Block, inbox: Block) -> memoryview:
    if not is_shared:
        return inbox.read(place)
    if place not in known:
        known[place] = shared.read(place)
    return known[place]


def _settle(circumstances: Mapping[str, Any]) -> None:
    """Be where the server is, and compute as it does."""
    sys.path[:] = circumstances["path"]
    os.chdir(circumstances["folder"])
    os.environ.clear()
    os.environ.update(circumstances["environment"])
    set_arithmetic(circumstances["arithmetic"], circumstances["num_threads"])
