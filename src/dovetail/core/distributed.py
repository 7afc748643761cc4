"""Ranks of a script's processes, and messages between them."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dovetail.accelerators import current_accelerator, device_of_process
from dovetail.distributed import Group, is_launched
from dovetail.errors import CheckpointError, ConfigError, DataError


@dataclass(kw_only=True, eq=False, repr=False)
class DistributedContext:
    """The rank of this process in a run, and messages between the processes.

    The processes connect when the first message is sent. Messages are numbers, strings, lists, tuples, dicts, tensors
    and arrays, as in a checkpoint: nothing is pickled. The methods that send messages are collective calls: all
    processes of the run must make them in the same order.

    Args:
        rank: The number of this process, from 0.
        size: The number of processes.
        local_rank: The number of this process on its machine, from 0.
        local_size: The number of processes on its machine.
        cross_rank: The number of its machine, from 0.
        cross_size: The number of machines.
        chief_ip: The address of the machine of rank 0, for processes that were started without a launcher of torch.
            None is enough on one machine. A launcher's `MASTER_ADDR` has priority.
        pub_port: The port at that address.
        pull_port: Has no effect and gives a warning: messages of both directions use one port.
        port_offset: A number that is added to the port, so that two runs can share a machine.
        force_tcp: True or False; messages between processes always use TCP.

    Example:
        >>> alone = DistributedContext()
        >>> alone.is_chief, alone.allgather({"loss": 0.5}), alone.shard_batch_size(64)
        (True, [{'loss': 0.5}], 64)
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    chief_ip: str | None = None
    pub_port: int = 12360
    pull_port: int | None = None
    port_offset: int = 0
    force_tcp: bool = False
    _group: Group | None = field(default=None, init=False)
    _is_owner: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for name, limit in (("rank", self.size), ("local_rank", self.local_size), ("cross_rank", self.cross_size)):
            if not 0 <= getattr(self, name) < limit:
                raise ConfigError(f"{name}: expected a number from 0 to {limit - 1}, got {getattr(self, name)}")
        if self.pull_port is not None:
            warnings.warn("pull_port has no effect: all messages use pub_port", UserWarning, stacklevel=3)

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Return the ranks that `torchrun` or a process group of torch assigned to this process.

        Args:
            chief_ip: Not needed: the processes connect to the launcher's `MASTER_ADDR`.

        Raises:
            ConfigError: The process was not started by `torchrun` and is in no process group.
        """
        if not is_launched():
            raise ConfigError(
                "this process is in no group: start it by 'python -m dovetail.launch' or 'torchrun', which set RANK, "
                "WORLD_SIZE and MASTER_ADDR"
            )
        # The process group decides: a script may have assigned other ranks than the launcher's variables.
        has_met = dist.is_initialized()
        rank = dist.get_rank() if has_met else _number("RANK")
        size = dist.get_world_size() if has_met else _number("WORLD_SIZE")
        # These two are not set if the user sets the others by hand; this means one machine.
        local_size = _number("LOCAL_WORLD_SIZE", size)
        return cls(
            rank=rank,
            size=size,
            local_rank=_number("LOCAL_RANK", rank),
            local_size=local_size,
            cross_rank=_number("GROUP_RANK", rank // local_size),
            cross_size=max(1, size // local_size),
            chief_ip=chief_ip,
        )

    @classmethod
    def from_environment(cls) -> DistributedContext:
        """Return the ranks that `torchrun` assigned to this process, or the ranks of a single process."""
        return cls.from_torch_distributed() if is_launched() else cls()

    @classmethod
    def from_horovod(cls, hvd: object, chief_ip: str | None = None) -> NoReturn:
        """Raise an error: Horovod is not supported."""
        raise ConfigError(f"from_horovod: {_INSTEAD}")

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> NoReturn:
        """Raise an error: DeepSpeed's launcher is not supported."""
        raise ConfigError(f"from_deepspeed: {_INSTEAD}")

    @classmethod
    def from_tf_config(cls) -> NoReturn:
        """Raise an error: TensorFlow is not supported."""
        raise ConfigError(f"from_tf_config: {_INSTEAD}")

    @property
    def is_chief(self) -> bool:
        """Whether this is the first process, which reports and writes for all processes."""
        return self.rank == 0

    @property
    def is_local_chief(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    def get_rank(self) -> int:
        """Return the rank of this process."""
        return self.rank

    def get_size(self) -> int:
        """Return the number of processes."""
        return self.size

    def get_local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        return self.local_rank

    def get_num_agents(self) -> int:
        """Return the number of machines."""
        return self.cross_size

    def shard_batch_size(self, global_batch_size: int) -> int:
        """Return the number of samples of each global batch that this process gets.

        If the global batch size is not divisible, it is reduced, with a warning.

        Raises:
            ConfigError: There are fewer samples than processes.
        """
        share, rest = divmod(global_batch_size, self.size)
        if share < 1:
            raise ConfigError(
                f"global batch size: expected at least {self.size}, one for each process, got {global_batch_size}"
            )
        if rest:
            warnings.warn(
                f"a global batch size of {global_batch_size} does not divide by {self.size} processes: "
                f"it is {share * self.size}, {share} for each",
                stacklevel=2,
            )
        return share

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all processes in the order of the ranks; None in all processes except the chief."""
        everyone = self.allgather(value)
        return everyone if self.is_chief else None

    def gather_local(self, value: Any) -> list[Any] | None:
        """Return the values of this machine's processes; None in all of them except the first."""
        everyone = self.allgather_local(value)
        return everyone if self.is_local_chief else None

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of the ranks."""
        return [message["value"] for message in self._exchange(value)]

    def allgather_local(self, value: Any) -> list[Any]:
        """Return the values of this machine's processes, in the order of their ranks."""
        return [message["value"] for message in self._exchange(value) if message["machine"] == self.cross_rank]

    def broadcast(self, value: Any) -> Any:
        """Return the chief's value; the values of the other processes are ignored."""
        return self.allgather(value if self.is_chief else None)[0]

    def broadcast_local(self, value: Any = None) -> Any:
        """Return the value of this machine's first process."""
        return self.allgather_local(value if self.is_local_chief else None)[0]

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group if this object has joined it; the other processes receive the error, if any."""
        if self._group is not None:
            if error is not None:
                self._group.tell_failure(error)
            # A group that the user's script created stays open for it.
            if self._is_owner:
                self._group.leave()
            self._group = None

    def _exchange(self, value: Any) -> list[dict[str, Any]]:
        if self.size == 1:
            return [{"value": value, "machine": self.cross_rank}]
        group = self._joined()
        try:
            everyone = group.exchange({"value": value, "machine": self.cross_rank})
        except CheckpointError as error:
            # The other processes wait for this message; they receive the error instead.
            everyone = group.exchange({"problem": str(error)})
        for rank, message in enumerate(everyone):
            if "problem" in message:
                raise DataError(f"rank {rank} cannot send its message: {message['problem']}")
        return everyone

    def _joined(self) -> Group:
        # Another object may have left the group for the whole process.
        if self._group is None or not dist.is_initialized():
            self._is_owner = not dist.is_initialized()
            # On first use: a script that sends no messages never waits for other processes.
            group = Group.join(local_device(self.local_rank), None if is_launched() else self._place())
            # Otherwise `gather` and `is_chief` would disagree about the ranks.
            if (group.rank, group.size) != (self.rank, self.size):
                raise ConfigError(
                    f"this process is rank {group.rank} of {group.size}, but its DistributedContext has rank "
                    f"{self.rank} of {self.size}"
                )
            self._group = group
        return self._group

    def _place(self) -> tuple[str, int, int]:
        """Return the address, the rank and the size for processes that were started without a launcher."""
        if self.chief_ip is None and self.local_size != self.size:
            raise ConfigError(
                f"chief_ip: {self.size} processes on several machines need the address of the machine of rank 0; give "
                "chief_ip, or start them by 'torchrun'"
            )
        return f"tcp://{self.chief_ip or '127.0.0.1'}:{self.pub_port + self.port_offset}", self.rank, self.size


_INSTEAD = "expected processes that torch starts; use DistributedContext.from_torch_distributed()"


def local_device(local_rank: int) -> torch.device:
    """Return the device of a process: one accelerator per process of a machine, or the CPU if there is none."""
    accelerator = current_accelerator()
    return torch.device("cpu") if accelerator is None else device_of_process(accelerator.type, local_rank)


def _number(variable: str, default: int | None = None) -> int:
    text = os.environ.get(variable, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {variable}: expected a number, got {text!r}") from None
