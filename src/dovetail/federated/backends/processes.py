"""Process backend: clients in worker processes of this machine, which are started once.

Every worker receives the pickled client once; its tensors and arrays are in shared memory, mapped as private copies. In
a round, objects that several tasks share (the weights, and payloads for all clients) are written to shared memory once
and read by every worker once. The state and the answer of a client use mailboxes between the server and one worker, one
in each direction. A socket transfers only notes about messages.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dovetail.errors import ConfigError
from dovetail.federated.backends.base import Work, Worker
from dovetail.federated.backends.nursery import Nursery, nursery
from dovetail.federated.backends.parcels import NOTE_SIZE, Block, Mailbox, Parcel, opened, packed
from dovetail.federated.backends.pool import Lost, News, Pool, Seat, WorkerError
from dovetail.federated.backends.sequential import attempted, fault
from dovetail.runtime.cores import num_cores
from dovetail.runtime.processes import describe_exit
from dovetail.runtime.relay import circumstances, described, rebuilt, set_circumstances
from dovetail.runtime.signals import listening

# Seconds for a worker to exit by itself when it has no tasks.
_GRACE = 2.0


@dataclass(eq=False, kw_only=True)
class _ProcessSeat(Seat):
    """A worker process with its nursery, its socket for notes, and its mailboxes for tasks and answers."""

    nursery: Nursery
    pid: int
    connection: socket.socket
    inbox: Mailbox
    outbox: Mailbox
    exit_code: int | None = None


class Process(Pool[_ProcessSeat]):
    """Runs clients in processes that are started once, each with its share of the cores.

    Answers equal the answers of `Sequential` bit for bit with the same number of threads. A client that ends its
    process, or takes longer than `timeout`, is left out of its round, and its process is replaced.

    Args:
        num_workers: The number of processes. None means one per core.
        timeout: Seconds for a client. None means no limit.

    Example:
        >>> Process(num_workers=2).num_workers
        2
    """

    ahead = 1

    def __init__(self, num_workers: int | None = None, timeout: float | None = None) -> None:
        super().__init__(num_workers, timeout)
        self._opened: tuple[Any, ...] = ()
        self._round = 0
        self._work: Sequence[Work] = ()

    def close(self) -> None:
        # All sockets are closed first, so that the workers exit at the same time.
        for seat in self._seats:
            self._hang_up(seat)
        super().close()
        for each in self._opened:
            each.close()
        self._opened, self._work = (), ()

    # ------------------------------------------------------------------ what a pool asks for

    def _open(self, worker: Worker) -> None:
        try:
            cargo = packed(worker)
        except Exception as error:
            raise ConfigError(f"the client or its data cannot be sent to other processes: {error}") from error
        self._cargo, self._shared, self._selector = Block(), Block(), selectors.DefaultSelector()
        self._opened = self._cargo, self._shared, self._selector
        self._message = cargo.content, self._cargo.write(cargo.bulk)

    def _size(self) -> int:
        return self.num_workers or num_cores()

    def _begin(self) -> _ProcessSeat:
        connection, theirs = socket.socketpair()
        inbox, outbox = Mailbox(), Mailbox()
        with theirs:
            blocks = (self._cargo.descriptor, self._shared.descriptor, *inbox.descriptors, *outbox.descriptors)
            home = nursery()
            try:
                pid = home.begin([theirs.fileno(), *blocks])
            except OSError as error:
                connection.close()
                raise WorkerError("workers cannot be started: the process that they are forked from died") from error
        seat = _ProcessSeat(nursery=home, pid=pid, connection=connection, inbox=inbox, outbox=outbox)
        self._selector.register(connection, selectors.EVENT_READ, seat)
        # `_listen` reports a worker that dies here.
        with suppress(OSError):
            connection.sendall(inbox.post((_circumstances(self._size()), *self._message)))
        return seat

    def _pack(self, work: Sequence[Work]) -> None:
        self._round += 1
        self._work = work
        common = _held_by_several(work)
        self._known = {key: number for number, key in enumerate(common)}
        parcel = _sendable(list(common.values()))
        # Workers do not read the shared memory between rounds.
        self._common = self._shared.write([memoryview(parcel.content), *parcel.bulk])

    def _give(self, seat: _ProcessSeat, position: int) -> bool:
        # Packed when it is needed, while the first clients run.
        parcel = _sendable(self._work[position], self._known)
        try:
            # A busy worker does not read, but notes are so short that they always fit into the socket.
            seat.connection.sendall(seat.inbox.post((self._round, self._common, parcel.content), parcel.bulk))
        except OSError:
            return False
        return True

    def _listen(self, timeout: float | None) -> Iterator[tuple[_ProcessSeat, News]]:
        for key, _ in self._selector.select(timeout):
            seat: _ProcessSeat = key.data
            try:
                note = _heard(seat.connection)
            except (EOFError, OSError):
                self._leave(seat, _GRACE)
                yield seat, Lost(f"its process {describe_exit(seat.exit_code)}")
                continue
            news = opened(*seat.outbox.fetch(note))
            if isinstance(news, Mapping):
                error = rebuilt(news)
                raise ConfigError(f"the client cannot be received by another process: {error}") from error
            yield seat, news

    def _end(self, seat: _ProcessSeat) -> None:
        self._leave(seat, _GRACE if seat.is_ready and not seat.given else 0.0)
        seat.inbox.close()
        seat.outbox.close()

    def _leave(self, seat: _ProcessSeat, grace: float) -> None:
        if seat.exit_code is None:
            self._hang_up(seat)
            # If the nursery is dead, it was killed with all its workers.
            seat.exit_code = -signal.SIGKILL
            with suppress(OSError):
                seat.exit_code = seat.nursery.end(seat.pid, grace)

    def _hang_up(self, seat: _ProcessSeat) -> None:
        if seat.connection.fileno() >= 0:
            self._selector.unregister(seat.connection)
            seat.connection.close()


def _circumstances(num_workers: int) -> dict[str, Any]:
    return {**circumstances(num_workers), "folder": os.getcwd(), "environment": dict(os.environ)}


def _held_by_several(work: Sequence[Work]) -> dict[int, Any]:
    """Return the objects that several tasks share, by identity: the weights, and payloads for all clients."""
    # All objects are kept alive until the end, so that no new object has the same identity.
    met, several = dict[int, Any](), dict[int, Any]()

    def meet(piece: Any) -> None:
        if id(piece) in met:
            several[id(piece)] = piece
        elif isinstance(piece, (Tensor, np.ndarray)):
            met[id(piece)] = piece
        elif isinstance(piece, (Mapping, list, tuple)) and piece:
            met[id(piece)] = piece
            for each in piece.values() if isinstance(piece, Mapping) else piece:
                meet(each)

    for task, _ in work:
        meet(task.weights)
        meet(task.payload)
    return several


def _sendable(content: Any, known: Mapping[int, int] | None = None) -> Parcel:
    try:
        return packed(content, known)
    except Exception as error:
        raise ConfigError(f"a task or a client's state cannot be sent to other processes: {error}") from error


# ------------------------------------------------------------------ in a worker


def live(descriptors: Sequence[int]) -> None:
    """Run a worker, from the first message to the last.

    Args:
        descriptors: The descriptors of the socket, of the blocks of the client and of rounds, and of the mailboxes for
            tasks and for answers.
    """
    connection = socket.socket(fileno=descriptors[0])
    cargo, shared = map(Block, descriptors[1:3])
    inbox, outbox = Mailbox(descriptors[3:5]), Mailbox(descriptors[5:])

    def answer(parcel: Parcel) -> None:
        connection.sendall(outbox.post(parcel.content, parcel.bulk))

    with suppress(EOFError, ConnectionError), listening():
        (found, content, places), _ = inbox.fetch(_heard(connection))
        _settle(found)
        try:
            memory = cargo.mapped()
            worker: Worker = opened(content, [memory[start : start + length] for start, length in places])
        except Exception as error:
            answer(packed(described(error)))
            return
        answer(packed("ready"))
        now, known = 0, list[Any]()
        while True:
            (number, places, content), bulk = inbox.fetch(_heard(connection))
            if number != now:
                first, *rest = shared.read_together(places)
                now, known = number, opened(bytes(first), rest)
            work: Work = opened(content, bulk, known)
            outcome = attempted(worker, work)
            try:
                parcel = packed(outcome)
            except Exception as error:
                parcel = packed(fault(work[0], error))
            answer(parcel)


def _heard(connection: socket.socket) -> bytes:
    """Wait for a note, and return it."""
    note = connection.recv(NOTE_SIZE, socket.MSG_WAITALL)
    if len(note) < NOTE_SIZE:
        raise EOFError
    return note


def _settle(found: Mapping[str, Any]) -> None:
    """Use the folder, the environment and the arithmetic settings of the server."""
    os.chdir(found["folder"])
    os.environ.clear()
    os.environ.update(found["environment"])
    # Last, because it sets a variable, too.
    set_circumstances(found)
