"""The processes of one run: what they add up, tell each other, and notice about each other."""

from __future__ import annotations

import atexit
import io
import os
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from itertools import count
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from dovetail.checkpoint.encoding import decode_text, encode
from dovetail.checkpoint.files import Digest
from dovetail.checkpoint.tensors import read_tensors, stream
from dovetail.errors import DovetailError

__all__ = ["Group", "PeerError", "is_launched", "is_part", "num_launched", "own_part", "part_of", "whole"]

_T = TypeVar("_T")

# Seconds that the others have to answer when one of them is missing.
_PATIENCE = 4.0
# Seconds for threads of a group that cannot be ended.
_LAST_TURN = 0.1
_WHERE = "a message of another process"
# Bytes of a message that are sent with its length.
_FIRST = 1016


class PeerError(DovetailError):
    """Another process of the run failed, or is gone."""


def is_launched() -> bool:
    """Whether this process is one of several of a run: started by `torchrun`, or in a group already."""
    return dist.is_available() and (dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys())


def num_launched() -> int:
    """Return of how many processes of a run this one is, whether or not they have met."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def is_part(value: Any) -> bool:
    """Whether a value is a tensor of which this process holds a part only (a `DTensor`)."""
    # Whoever has one has imported this; importing it here would cost a process that is alone a second.
    sharding = sys.modules.get("torch.distributed.tensor")
    return sharding is not None and isinstance(value, sharding.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, to compute with it element by element: the memory is the same."""
    part: Any = tensor
    return part.to_local() if is_part(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, which every process that holds a part of it must ask for."""
    parts: Any = tensor
    return parts.full_tensor() if is_part(tensor) else tensor


def part_of(tensor: Tensor, like: Any) -> Tensor:
    """Return a tensor divided as another one is, of which every process has the whole; as it is where nothing is."""
    if not is_part(like) or is_part(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class Group:
    """The processes of one run, as one of them sees them.

    Messages are JSON and tensors, as in a checkpoint; nothing is pickled.

    Attributes:
        rank: The number of this process, from 0.
        size: How many there are.
    """

    def __init__(self, store: Any) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._store = store

    @classmethod
    def join(cls, device: torch.device, place: tuple[str, int, int] | None = None) -> Group:
        """Meet the others: with gloo for a CPU, with nccl besides for CUDA. A group that is there already is used.

        Args:
            device: The device of this process.
            place: The address of rank 0 (`tcp://HOST:PORT`), the rank of this process and the number of processes; None
                for those in the environment variables that a launcher sets.
        """
        if dist.is_initialized():
            return cls(_STORES[-1] if _STORES else None)
        if not _PLACES:
            # One for the life of the process: who meets again after an error must not find half of the old one.
            address, rank, size = ("env://", -1, -1) if place is None else place
            _PLACES.append(next(iter(rendezvous(address, rank, size, timeout=timedelta(minutes=10)))))
        store, rank, size = _PLACES[0]
        # A restarted group must not find the addresses of the one before, nor one that met again after an error.
        attempt, meeting = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), next(_MEETINGS)
        store = dist.PrefixStore(f"dovetail/{attempt}/{meeting}", store)  # type: ignore[attr-defined]  # exported, not to mypy
        # The first optimizer imports this module, whose functions take the group that they find as a default, and keep
        # it for ever. Its threads would live on when the interpreter ends, which aborts the process now and then.
        import_module("torch.distributed.nn.functional")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        store.set(f"at/{rank}", f"{socket.gethostname()} {os.getpid()}")
        _STORES.append(store)
        atexit.register(_leave_for_good)
        return cls(store)

    def sum(self, *tensors: Tensor) -> None:
        """Replace tensors by the sums of everyone's."""
        try:
            if len(tensors) == 1:
                dist.all_reduce(tensors[0])
                return
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise PeerError(self._roll_call()) from error

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of the first process."""
        for tensor in tensors:
            self._together(lambda tensor=tensor: dist.broadcast(tensor, 0))  # type: ignore[misc]  # bound per tensor

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return everyone's message, in the order of the ranks."""
        packed = _packed(message)
        # What every message begins with: its length, and as much of it as most messages have.
        starts = self._gathered(struct.pack("<Q", len(packed)) + packed[:_FIRST], 8 + _FIRST)
        lengths = [struct.unpack_from("<Q", start)[0] for start in starts]
        if max(lengths) <= _FIRST:
            return [_unpacked(start[8 : 8 + length]) for start, length in zip(starts, lengths, strict=True)]
        messages = self._gathered(packed, max(lengths))
        return [_unpacked(each[:length]) for each, length in zip(messages, lengths, strict=True)]

    def _gathered(self, own: bytes, size: int) -> list[bytes]:
        padded = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        self._together(lambda: dist.all_gather(received, padded))
        return [each.numpy().tobytes() for each in received]

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Say who is gone when something of torch's own that the processes do together fails for that."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise PeerError(self._roll_call()) from error
            raise

    def tell_failure(self, error: BaseException) -> None:
        """Let the others know why this process leaves, if they can be reached."""
        if self._store is not None:
            with suppress(Exception):
                self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}"[:500])

    def leave(self) -> None:
        """Break the connections, so that nobody waits for this process any longer."""
        _leave()

    def _together(self, operation: Callable[[], _T]) -> _T:
        try:
            return operation()
        except RuntimeError as error:
            raise PeerError(self._roll_call()) from error

    def _roll_call(self) -> str:
        """Say who does not answer any longer."""
        store, others = self._store, [rank for rank in range(self.size) if rank != self.rank]
        if store is None:
            return f"rank {self.rank} lost the connection to the other processes of the run"
        deadline = time.monotonic() + _PATIENCE
        gone, failed = [], []
        try:
            store.set(f"here/{self.rank}", "")
            for rank in others:
                if _answers(store, rank, deadline):
                    if store.check([f"failed/{rank}"]):
                        failed.append(f"rank {rank} failed: {store.get(f'failed/{rank}').decode()}")
                else:
                    gone.append(rank)
            store.set(f"asked/{self.rank}", "")
            if self.rank == 0:
                # Where the others ask is a thread of this process, unless a launcher keeps it: it stays for them.
                for rank in (rank for rank in others if rank not in gone and not store.check([f"failed/{rank}"])):
                    _answers(store, rank, deadline, "asked")
        except Exception:
            # The meeting point is a thread of the first process, unless a launcher keeps it.
            return "rank 0, where the processes of the run met, is gone"
        if failed:
            return "; ".join(failed)
        if gone:
            return " and ".join(f"rank {rank}" for rank in gone) + (" is" if len(gone) == 1 else " are") + " gone"
        return f"rank {self.rank} lost the connection to the other processes of the run"


# The store of the group that was joined last; torch keeps the group itself as globally.
_STORES: list[Any] = []
_MEETINGS = count()
_PLACES: list[Any] = []


def _leave() -> None:
    _STORES.clear()
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()


def _leave_for_good() -> None:
    """Leave before the interpreter ends: a thread that waits to give a tensor back then aborts the process."""
    group = weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
    _leave()
    if group is not None and group() is not None:
        # A sharded model keeps the group. Its threads give back at once what they hold while nobody else runs Python.
        time.sleep(_LAST_TURN)


def _answers(store: Any, rank: int, deadline: float, word: str = "here") -> bool:
    """Whether a process says a word in time, or that it failed."""
    host, pid = store.get(f"at/{rank}").decode().split() if store.check([f"at/{rank}"]) else ("", "0")
    while not (store.check([f"failed/{rank}"]) or store.check([f"{word}/{rank}"])):
        is_dead = host == socket.gethostname() and not _runs(int(pid))
        if is_dead or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _packed(message: Mapping[str, Any]) -> bytes:
    encoded = encode(message)
    tensors = b"".join(bytes(chunk) for chunk in stream(encoded.blocks))
    return struct.pack("<Q", len(encoded.text)) + encoded.text + tensors


def _unpacked(message: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", message)
    text, rest = message[8 : 8 + length], message[8 + length :]
    tensors = read_tensors(io.BytesIO(rest), len(rest), _WHERE, Digest()) if rest else {}
    decoded: dict[str, Any] = decode_text(text, _WHERE, tensors, "cpu")
    return decoded
