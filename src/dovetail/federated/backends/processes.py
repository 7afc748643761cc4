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
from dovetail.federated.backends.fork_server import fork_server
from dovetail.federated.backends.pool import LostWorker, Pool, WorkerError, WorkerHandle, WorkerReport
from dovetail.federated.backends.sequential import fault, run_client
from dovetail.federated.backends.shared_memory import NOTE_SIZE, Block, Mailbox, PackedMessage, pack, unpack
from dovetail.runtime.cores import num_cores
from dovetail.runtime.fork_server import ForkServer
from dovetail.runtime.processes import describe_exit
from dovetail.runtime.relay import apply_worker_settings, describe_error, rebuild_error, worker_settings
from dovetail.runtime.signals import install_handlers_once

# Seconds for a worker to exit by itself when it has no tasks.
_GRACE = 2.0


@dataclass(eq=False, kw_only=True)
class _ProcessHandle(WorkerHandle):
    """A worker process with its fork server, its socket for notes, and its mailboxes for tasks and answers."""

    fork_server: ForkServer
    pid: int
    connection: socket.socket
    inbox: Mailbox
    outbox: Mailbox
    exit_code: int | None = None


class Process(Pool[_ProcessHandle]):
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
        self._resources: tuple[Any, ...] = ()
        self._round = 0
        self._work: Sequence[Work] = ()

    def close(self) -> None:
        # All sockets are closed first, so that the workers exit at the same time.
        for handle in self._handles:
            self._close_connection(handle)
        super().close()
        for each in self._resources:
            each.close()
        self._resources, self._work = (), ()

    # ------------------------------------------------------------------ methods of the pool

    def _open(self, worker: Worker) -> None:
        try:
            packed = pack(worker)
        except Exception as error:
            raise ConfigError(f"the client or its data cannot be sent to other processes: {error}") from error
        self._worker_block, self._shared, self._selector = Block(), Block(), selectors.DefaultSelector()
        self._resources = self._worker_block, self._shared, self._selector
        self._message = packed.content, self._worker_block.write(packed.bulk)

    def _size(self) -> int:
        return self.num_workers or num_cores()

    def _start_worker(self) -> _ProcessHandle:
        connection, theirs = socket.socketpair()
        inbox, outbox = Mailbox(), Mailbox()
        with theirs:
            blocks = (self._worker_block.descriptor, self._shared.descriptor, *inbox.descriptors, *outbox.descriptors)
            server = fork_server()
            try:
                pid = server.start_worker([theirs.fileno(), *blocks])
            except OSError as error:
                connection.close()
                raise WorkerError("workers cannot be started: the process that they are forked from died") from error
        handle = _ProcessHandle(fork_server=server, pid=pid, connection=connection, inbox=inbox, outbox=outbox)
        self._selector.register(connection, selectors.EVENT_READ, handle)
        # `_receive_reports` reports a worker that dies here.
        with suppress(OSError):
            connection.sendall(inbox.post((_worker_settings(self._size()), *self._message)))
        return handle

    def _pack(self, work: Sequence[Work]) -> None:
        # Workers compare this number with the last one, and read the shared objects again if it differs.
        self._round += 1
        self._work = work
        common = _shared_objects(work)
        self._known = {key: number for number, key in enumerate(common)}
        message = _pack_content(list(common.values()))
        # Workers do not read the shared memory between rounds.
        self._common = self._shared.write([memoryview(message.content), *message.bulk])

    def _send_task(self, handle: _ProcessHandle, position: int) -> bool:
        # Packed when it is needed, while the first clients run.
        message = _pack_content(self._work[position], self._known)
        try:
            # A busy worker does not read, but notes are so short that they always fit into the socket.
            handle.connection.sendall(handle.inbox.post((self._round, self._common, message.content), message.bulk))
        except OSError:
            return False
        return True

    def _receive_reports(self, timeout: float | None) -> Iterator[tuple[_ProcessHandle, WorkerReport]]:
        for key, _ in self._selector.select(timeout):
            handle: _ProcessHandle = key.data
            try:
                note = _receive_note(handle.connection)
            except (EOFError, OSError):
                self._wait_for_exit(handle, _GRACE)
                yield handle, LostWorker(f"its process {describe_exit(handle.exit_code)}")
                continue
            report = unpack(*handle.outbox.fetch(note))
            # A mapping describes an error of unpickling the client, which every other worker would have, too.
            if isinstance(report, Mapping):
                error = rebuild_error(report)
                raise ConfigError(f"the client cannot be received by another process: {error}") from error
            yield handle, report

    def _stop_worker(self, handle: _ProcessHandle) -> None:
        self._wait_for_exit(handle, _GRACE if handle.is_ready and not handle.assigned_tasks else 0.0)
        handle.inbox.close()
        handle.outbox.close()

    def _wait_for_exit(self, handle: _ProcessHandle, grace: float) -> None:
        if handle.exit_code is None:
            self._close_connection(handle)
            # If the fork server is dead, it was killed with all its workers.
            handle.exit_code = -signal.SIGKILL
            with suppress(OSError):
                handle.exit_code = handle.fork_server.stop_worker(handle.pid, grace)

    def _close_connection(self, handle: _ProcessHandle) -> None:
        if handle.connection.fileno() >= 0:
            self._selector.unregister(handle.connection)
            handle.connection.close()


def _worker_settings(num_workers: int) -> dict[str, Any]:
    return {**worker_settings(num_workers), "folder": os.getcwd(), "environment": dict(os.environ)}


def _shared_objects(work: Sequence[Work]) -> dict[int, Any]:
    """Return the objects that several tasks share, by identity: the weights, and payloads for all clients."""
    # All objects are kept alive until the end, so that no new object has the same identity.
    seen, several = dict[int, Any](), dict[int, Any]()

    def visit(piece: Any) -> None:
        if id(piece) in seen:
            several[id(piece)] = piece
        elif isinstance(piece, (Tensor, np.ndarray)):
            seen[id(piece)] = piece
        elif isinstance(piece, (Mapping, list, tuple)) and piece:
            seen[id(piece)] = piece
            for each in piece.values() if isinstance(piece, Mapping) else piece:
                visit(each)

    for task, _ in work:
        visit(task.weights)
        visit(task.payload)
    return several


def _pack_content(content: Any, known: Mapping[int, int] | None = None) -> PackedMessage:
    try:
        return pack(content, known)
    except Exception as error:
        raise ConfigError(f"a task or a client's state cannot be sent to other processes: {error}") from error


# ------------------------------------------------------------------ in a worker


def run_worker(descriptors: Sequence[int], details: Mapping[str, Any]) -> None:
    """Run a worker, from the first message to the last.

    Args:
        descriptors: The descriptors of the socket, of the blocks of the client and of rounds, and of the mailboxes for
            tasks and for answers.
        details: Empty.
    """
    connection = socket.socket(fileno=descriptors[0])
    worker_block, shared = map(Block, descriptors[1:3])
    inbox, outbox = Mailbox(descriptors[3:5]), Mailbox(descriptors[5:])

    def answer(message: PackedMessage) -> None:
        connection.sendall(outbox.post(message.content, message.bulk))

    with suppress(EOFError, ConnectionError), install_handlers_once():
        (found, content, places), _ = inbox.fetch(_receive_note(connection))
        _apply_settings(found)
        try:
            memory = worker_block.map_private()
            # The mapping is private: a client that changes its data in place changes no other worker's data.
            worker: Worker = unpack(content, [memory[start : start + length] for start, length in places])
        except Exception as error:
            answer(pack(describe_error(error)))
            return
        answer(pack("ready"))
        now, known = 0, list[Any]()
        while True:
            (number, places, content), bulk = inbox.fetch(_receive_note(connection))
            # The first task of a round: the shared weights are read once for all tasks of this worker.
            if number != now:
                first, *rest = shared.read_together(places)
                now, known = number, unpack(bytes(first), rest)
            work: Work = unpack(content, bulk, known)
            outcome = run_client(worker, work)
            try:
                message = pack(outcome)
            except Exception as error:
                # The client has trained, but its answer or state cannot be pickled. The worker lives on for the next
                # client.
                message = pack(fault(work[0], error))
            answer(message)


def _receive_note(connection: socket.socket) -> bytes:
    """Wait for a note, and return it."""
    note = connection.recv(NOTE_SIZE, socket.MSG_WAITALL)
    if len(note) < NOTE_SIZE:
        raise EOFError
    return note


def _apply_settings(found: Mapping[str, Any]) -> None:
    """Use the folder, the environment and the arithmetic settings of the server."""
    os.chdir(found["folder"])
    os.environ.clear()
    os.environ.update(found["environment"])
    # Last, because it sets a variable, too.
    apply_worker_settings(found)
