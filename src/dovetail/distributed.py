"""Process group of a run: sums, messages, and detection of failed processes."""

from __future__ import annotations

import atexit
import io
import os
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from dovetail.accelerators import collective_backend
from dovetail.checkpoint.encoding import decode_text, encode
from dovetail.checkpoint.files import Digest
from dovetail.checkpoint.tensors import read_tensors, stream
from dovetail.errors import DovetailError
from dovetail.runtime.liveness import Watch, neighbour, own_address

__all__ = [
    "DataGroup",
    "Group",
    "PeerError",
    "StoppedPeerError",
    "is_launched",
    "is_part",
    "num_launched",
    "own_part",
    "part_of",
    "share_overflow",
    "whole",
]

_T = TypeVar("_T")

# Seconds in which the other processes must respond after a failed operation.
_PATIENCE = 4.0
# Seconds for the threads of a group that cannot be destroyed.
_LAST_TURN = 0.1
_WHERE = "a message of another process"
# Number of bytes of a message that are sent together with its length.
_FIRST = 1016


class PeerError(DovetailError):
    """Another process of the run has failed or ended."""


class StoppedPeerError(PeerError):
    """Another process of the run was stopped or late, and did not continue in time."""


def is_launched() -> bool:
    """Return whether this process is one of several of a run: started by `torchrun`, or already in a process group."""
    return dist.is_available() and (dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys())


def num_launched() -> int:
    """Return the number of processes of the run, whether or not they have connected."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def is_part(value: Any) -> bool:
    """Return whether a value is a `DTensor`, of which this process holds only a part."""
    # Do not import it here: this takes a second, and the module is imported already if there is a DTensor.
    sharding = sys.modules.get("torch.distributed.tensor")
    return sharding is not None and isinstance(value, sharding.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, for element-wise operations; it shares the memory."""
    part: Any = tensor
    return part.to_local() if is_part(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. A collective call: every process that holds a part must make it."""
    if not is_part(tensor):
        return tensor
    parts: Any = tensor
    for dimension in _joining_order(parts)[:-1]:
        parts = parts.redistribute(placements=_joined(parts, dimension))
    joined: Tensor = parts.full_tensor()
    return joined


def part_of(tensor: Tensor, like: Any) -> Tensor:
    """Return a tensor sharded like another tensor; unchanged if the other one is not sharded.

    A collective call if the tensor is sharded in another way.
    """
    if not is_part(like):
        return tensor
    if is_part(tensor):
        parts: Any = tensor
        if parts.device_mesh == like.device_mesh and parts.placements == like.placements:
            return tensor
        tensor = whole(tensor).detach()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def share_overflow(gradients: Iterable[Tensor | None], flags: Iterable[Tensor]) -> None:
    """Set flags in all processes if one of them has set its own, after float16 gradients were unscaled.

    Torch exchanges the flags over the dimensions of the mesh that divide the first gradient. If another gradient is
    divided over more of them, only some processes would skip the step, and the weights would differ. A collective call.
    """
    sharding = sys.modules.get("torch.distributed.tensor")
    if sharding is None:
        return
    if len({(it.device_mesh, it.placements) for it in gradients if isinstance(it, sharding.DTensor)}) > 1:
        for flag in flags:
            dist.all_reduce(own_part(flag), dist.ReduceOp.MAX)


def _joining_order(parts: Any) -> list[int]:
    """Return the dimensions of the mesh over which a tensor is divided, the one that divided it last first.

    Each is joined by its own message: torch 2.13 joins two dimensions in one message if it can, and then returns rows
    in a wrong order if the parts have different sizes.
    """
    divided = [number for number, placement in enumerate(parts.placements) if not placement.is_replicate()]
    # `fully_shard` divides the parts of a tensor-parallel plan, but its dimension is the first one, with strides.
    return sorted(divided, key=lambda it: (getattr(parts.placements[it], "split_factor", 1) == 1, -it))


def _joined(parts: Any, dimension: int) -> list[Any]:
    """Return the placements of a tensor that is no longer divided over one dimension of its mesh."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if number == dimension else it for number, it in enumerate(parts.placements)]


class Group:
    """The process group of a run.

    Messages are JSON and tensors, as in a checkpoint; nothing is pickled.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
        counts: True if the numbers of this process are part of sums.
        connections: The process group for all messages; None means torch's default group.
    """

    counts: bool = True

    def __init__(self, store: Any, connections: dist.ProcessGroup | None = None) -> None:
        self.rank = self._place = dist.get_rank()
        self.size = self._total = dist.get_world_size()
        self.connections = connections
        self._store = store

    @property
    def everyone(self) -> Group:
        """The group of all processes of the run: this group, unless it is a `DataGroup`."""
        return self

    @classmethod
    def join(cls, device: torch.device, place: tuple[str, int, int] | None = None) -> Group:
        """Connect to the other processes, with gloo and the accelerator's backend. An existing process group is reused.

        Args:
            device: The device of this process.
            place: The address of rank 0 (`tcp://HOST:PORT`), the rank of this process and the number of processes; None
                means the values of the environment variables that a launcher sets.
        """
        if dist.is_initialized():
            # Created by an earlier run, or by the user's own code, which has no store for failures.
            return cls(_STORES[-1] if _STORES else None, _connections_with_cpu())
        if not _PLACES:
            # One rendezvous per process: joining again after an error must not find a closed one.
            address, rank, size = ("env://", -1, -1) if place is None else place
            _PLACES.append(next(iter(rendezvous(address, rank, size, timeout=timedelta(minutes=10)))))
        store, rank, size = _PLACES[0]
        # Separate keys for each restart and each join: old keys contain addresses of ended processes.
        attempt, meeting = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), next(_MEETINGS)
        store = dist.PrefixStore(f"dovetail/{attempt}/{meeting}", store)  # type: ignore[attr-defined]  # exported, not to mypy
        # The first optimizer imports this module. Its functions store the current group as a default value and never
        # release it; its threads then sometimes abort the interpreter at its end. So import it before there is a group.
        import_module("torch.distributed.nn.functional")
        dist.init_process_group(collective_backend(device.type), store=store, rank=rank, world_size=size)
        store.set(f"at/{rank}", own_address())
        _STORES.append(store)
        if size > 1:
            _WATCHES.append(Watch(store, rank, size))
        atexit.register(_leave_at_exit)
        return cls(store)

    def sum(self, *tensors: Tensor) -> None:
        """Replace tensors by their sums over all processes."""
        try:
            if len(tensors) == 1:
                dist.all_reduce(tensors[0], group=self.connections)
                return
            # Started together, so that the sums overlap.
            for work in [dist.all_reduce(tensor, group=self.connections, async_op=True) for tensor in tensors]:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise self.lost() from error

    def sum_with_events(self, numbers: Sequence[float], events: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return sums of numbers, and sums of events, in which every process of the run counts."""
        own = numbers if self.counts else [0.0] * len(numbers)
        sums = torch.tensor([*own, *events], dtype=torch.float64)
        self.everyone.sum(sums)
        found = sums.tolist()
        return found[: len(numbers)], found[len(numbers) :]

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by the tensors of the first process."""
        self.copy_from(0, tensors)

    def copy_from(self, rank: int, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by the tensors of one process, by its rank among all processes of the run."""
        for tensor in tensors:
            self._together(lambda tensor=tensor: dist.broadcast(tensor, rank, self.connections))  # type: ignore[misc]  # bound per tensor

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of all processes, in the order of the ranks."""
        packed = _packed(message)
        # First the length and the first bytes of each message: one exchange is enough for most messages.
        starts = self._gathered(struct.pack("<Q", len(packed)) + packed[:_FIRST], 8 + _FIRST)
        lengths = [struct.unpack_from("<Q", start)[0] for start in starts]
        if max(lengths) <= _FIRST:
            return [_unpacked(start[8 : 8 + length]) for start, length in zip(starts, lengths, strict=True)]
        messages = self._gathered(packed, max(lengths))
        return [_unpacked(each[:length]) for each, length in zip(messages, lengths, strict=True)]

    def _gathered(self, own: bytes, size: int) -> list[bytes]:
        # `all_gather` needs tensors of equal size.
        padded = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self._total)]
        self._together(lambda: dist.all_gather(received, padded, self.connections))
        return [each.numpy().tobytes() for each in received]

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Raise `PeerError` with the missing processes if a collective operation of torch in the block fails."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise self.lost() from error
            raise

    def new_channel(self) -> dist.ProcessGroup:
        """Return another group of the same processes, whose messages keep their own order. A collective call."""
        chosen: Any = dist.group.WORLD if self.connections is None else self.connections
        options = getattr(chosen._get_backend(torch.device("cpu")), "options", None)
        # Torch gives a new group the default timeout, and not the timeout that a user's script chose.
        timeout = getattr(options, "_timeout", None)
        backend = None if self.connections is None else dist.get_backend_config(self.connections)
        channel: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
        return channel

    def lost(self) -> PeerError:
        """Return the error to raise after a failed collective operation, with the names of the missing processes."""
        if _WATCHES and _WATCHES[-1].problem is not None:
            return StoppedPeerError(_WATCHES[-1].problem)
        description, stopped = self._describe_lost_peers(), []
        if self._store is not None:
            # The store may have ended with the first process.
            with suppress(Exception):
                keys = [f"late/{rank}" for rank in range(self._total)]
                stopped = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        return StoppedPeerError(stopped[0]) if stopped else PeerError(description)

    def tell_failure(self, error: BaseException) -> None:
        """Send the error with which this process exits to the other processes, if they can be reached."""
        if self._store is not None:
            with suppress(Exception):
                self._store.set(f"failed/{self._place}", f"{type(error).__name__}: {error}"[:500])

    def leave(self) -> None:
        """Close the connections, so that no process waits for this one."""
        _leave()

    def _together(self, operation: Callable[[], _T]) -> _T:
        try:
            return operation()
        except RuntimeError as error:
            raise self.lost() from error

    def _describe_lost_peers(self) -> str:
        """Return a sentence about the processes that failed or do not respond."""
        store, others = self._store, [rank for rank in range(self._total) if rank != self._place]
        if store is None:
            return f"rank {self._place} lost the connection to the other processes of the run"
        deadline = time.monotonic() + _PATIENCE
        gone: list[int] = []
        late: list[int] = []
        failed: list[str] = []
        try:
            # Every process that is alive writes this key after a failure; one that does not is gone.
            store.set(f"here/{self._place}", "")
            for rank in others:
                if _answers(store, rank, deadline):
                    if store.check([f"failed/{rank}"]):
                        failed.append(f"rank {rank} failed: {store.get(f'failed/{rank}').decode()}")
                else:
                    pid = _pid(store, rank)
                    (gone if pid is None or not _runs(pid) else late).append(rank)
            store.set(f"asked/{self._place}", "")
            if self._place == 0:
                # The store may be a thread of this process: stay until the other processes have made their checks, too.
                silent = {*gone, *late}
                for rank in (rank for rank in others if rank not in silent and not store.check([f"failed/{rank}"])):
                    _answers(store, rank, deadline, "asked")
        except Exception:
            # The store is a thread of the first process, unless a launcher runs it.
            return "rank 0, which hosts the store of the run, is gone"
        if failed:
            return "; ".join(failed)
        if gone:
            return " and ".join(f"rank {rank}" for rank in gone) + (" is" if len(gone) == 1 else " are") + " gone"
        if late:
            return " and ".join(f"rank {rank}" for rank in late) + " did not take part in time, and still runs"
        return f"rank {self._place} lost the connection to the other processes of the run"


class DataGroup(Group):
    """The processes of a run, seen as the groups of processes that compute the same batches.

    Consecutive processes compute the same batches together, each with a part of the tensors (tensor parallel). A rank
    and the size of this group count such groups, so batches are divided by them. Messages and sums have the numbers of
    the first process of each group. All processes of the run receive the same results, so that they take the same
    decisions.

    Args:
        everyone: The group of all processes.
        num_alike: The number of consecutive processes that compute the same batches.
    """

    def __init__(self, everyone: Group, num_alike: int) -> None:
        super().__init__(everyone._store, everyone.connections)
        self._everyone = everyone
        self._num_alike = num_alike
        self.rank, coordinate = divmod(everyone.rank, num_alike)
        self.size = everyone.size // num_alike
        self.counts = coordinate == 0

    @property
    def everyone(self) -> Group:
        """The group of all processes of the run."""
        return self._everyone

    def sum(self, *tensors: Tensor) -> None:
        if not self.counts:
            for tensor in tensors:
                tensor.zero_()
        super().sum(*tensors)

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._everyone.exchange(message)[:: self._num_alike]


# The store of the group that was joined last, and its watch. Global, because torch's process group is global, too.
_STORES: list[Any] = []
_WATCHES: list[Watch] = []
_MEETINGS = count()
_PLACES: list[Any] = []
# The group that stands for a default group without the CPU, and this default group.
_OTHERS: list[tuple[Any, Any]] = []


def _connections_with_cpu() -> dist.ProcessGroup | None:
    """Return a process group that can send tensors of the CPU; None if the default group can. A collective call.

    A script that calls `init_process_group("nccl")` has a default group that sends tensors of the accelerator only.
    """
    world: Any = dist.group.WORLD
    if torch.device("cpu") in world._device_types:
        return None
    if not _OTHERS or _OTHERS[-1][0]() is not world:
        made: dist.ProcessGroup = dist.new_group(backend=f"cpu:gloo,{dist.get_backend_config(world)}")
        _OTHERS[:] = [(weakref.ref(world), made)]
    chosen: dist.ProcessGroup = _OTHERS[-1][1]
    return chosen


def _leave() -> None:
    while _WATCHES:
        _WATCHES.pop().close()
    _STORES.clear()
    _OTHERS.clear()
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear torch's caches of operators on sharded tensors.

    Their results have a mesh. Meshes of equal shape are equal, so that a later run would get the mesh of this group,
    whose connections are closed.
    """
    # Private functions, which another version of torch may lack.
    with suppress(ImportError, AttributeError):
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import _redistribute, debug

            debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch has no types for it
            _redistribute._gen_transform_infos.cache_clear()
            _redistribute.clear_redistribute_planner_cache()


def _leave_at_exit() -> None:
    """Leave the group before the interpreter ends: a thread that then releases a tensor aborts the process."""
    group = weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
    _leave()
    if group is not None and group() is not None:
        # A sharded model still refers to the group. Its threads release their tensors while this thread sleeps.
        time.sleep(_LAST_TURN)


def _answers(store: Any, rank: int, deadline: float, word: str = "here") -> bool:
    """Return whether a process writes a key in time, or has reported a failure."""
    pid = _pid(store, rank)
    while not (store.check([f"failed/{rank}"]) or store.check([f"{word}/{rank}"])):
        is_dead = pid is not None and not _runs(pid)
        if is_dead or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _pid(store: Any, rank: int) -> int | None:
    """Return the number of the process of a rank; None if it is on another machine."""
    return neighbour(store.get(f"at/{rank}").decode()) if store.check([f"at/{rank}"]) else None


def _runs(pid: int) -> bool:
    try:
        # A zombie has ended, and only its exit code is left.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _packed(message: Mapping[str, Any]) -> bytes:
    # The length of the JSON text, the text, then all tensors as a safetensors file.
    encoded = encode(message)
    tensors = b"".join(bytes(chunk) for chunk in stream(encoded.blocks))
    return struct.pack("<Q", len(encoded.text)) + encoded.text + tensors


def _unpacked(message: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", message)
    text, rest = message[8 : 8 + length], message[8 + length :]
    tensors = read_tensors(io.BytesIO(rest), len(rest), _WHERE, Digest()) if rest else {}
    decoded: dict[str, Any] = decode_text(text, _WHERE, tensors, "cpu")
    return decoded
