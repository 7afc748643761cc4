"""Distribution of the batches of an epoch over several processes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch.utils.data as torch_data
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from dovetail.data.loader import DataLoader, iterate_from
from dovetail.data.sources import num_batches


@dataclass(frozen=True)
class Share:
    """The share of one process in the batches of an epoch. Each process uses one batch in every step.

    The shares of all processes together are exactly the batches of a single process. If the number of batches is not
    divisible, some processes have no batch in the last step.

    An epoch that was started with another number of processes is divided again from its current position.

    Attributes:
        num_replicas: The number of processes.
        rank: The rank of this process.
        start_step: Steps of the current epoch that were made before it was divided in this way.
        used: Batches that those steps used.

    Example:
        >>> share = Share(num_replicas=2, rank=1)
        >>> share.num_steps(5), share.num_own(5)
        (3, 2)
    """

    num_replicas: int = 1
    rank: int = 0
    start_step: int = 0
    used: int = 0

    def position(self, step: int) -> int:
        """Return the number of batches of the epoch that all processes have used before a step."""
        return self.used + (step - self.start_step) * self.num_replicas

    def num_steps(self, total: int) -> int:
        """Return the number of steps of an epoch of `total` batches."""
        # Floor division of a negative number: the rest of the batches, divided and rounded up.
        return self.start_step - (self.used - total) // self.num_replicas

    def num_own(self, total: int) -> int:
        """Return the number of steps, including earlier ones, in which this process has a batch."""
        return self.start_step + len(range(self.used + self.rank, total, self.num_replicas))

    def turn(self, step: int) -> tuple[int, int]:
        """Return the rank whose batches this process reads from a step on, and how many of them are already used."""
        # If another number of processes started the epoch, `used` may not be a multiple of `num_replicas`. Then the
        # next batch of this process is in the share of another rank.
        done, rank = divmod(self.position(step) + self.rank, self.num_replicas)
        return rank, done


def is_shared_already(loader: Any) -> bool:
    """Return whether a loader has a sampler of torch that selects samples for each process."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def is_torchdata_loader(loader: Any) -> bool:
    """Return whether torchdata's loader reads a dataset by index that has no state: then torch's loader reads it, too.

    Datasets and samplers with their own state are left to torchdata.
    """
    kind = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    if kind is None or type(loader) is not kind:
        return False
    parts = (loader.dataset, loader.sampler, loader.batch_sampler)
    return not any(isinstance(part, (IterableDataset, _HasState)) for part in parts)


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> Any: ...


def _without_own_order(loader: torch_data.DataLoader[Any]) -> torch_data.DataLoader[Any]:
    """Return a torch loader instead of one that shuffles with a generator that torchdata has seeded for itself."""
    sampler = loader.sampler
    if not is_torchdata_loader(loader) or loader.generator is not None or isinstance(sampler, _TORCH_SAMPLERS):
        return loader
    if type(sampler).__module__ != "torchdata.stateful_dataloader.sampler" or loader.batch_size is None:
        return loader
    return torch_data.DataLoader(
        loader.dataset,
        loader.batch_size,
        shuffle=True,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def shared(loader: Iterable[Any], num_replicas: int, rank: int, seed: int | None) -> Iterable[Any]:
    """Return every `num_replicas`-th batch of a loader from batch `rank`, in the same order for all processes.

    Args:
        loader: Any iterable of batches.
        num_replicas: The number of processes.
        rank: The rank of this process.
        seed: Used if torch's global generator, which differs between processes, would order the samples: the order is
            then a function of this seed and of the epoch. None means that the generators are in the same state in all
            processes.

    Raises:
        DataError: Torch's global generator does more than shuffle the dataset.
    """
    # Only these loaders can leave out batches without reading them; a subclass with its own iteration is read whole.
    if isinstance(loader, torch_data.DataLoader) and (
        type(loader).__iter__ in _ITERATIONS or is_torchdata_loader(loader)
    ):
        loader = loader if seed is None else _without_own_order(loader)
        return DataLoader.from_torch(loader, seed=seed, num_replicas=num_replicas, rank=rank)
    return _EveryNth(loader, num_replicas, rank)


_TORCH_SAMPLERS = (SequentialSampler, RandomSampler)
_ITERATIONS = (torch_data.DataLoader.__iter__, DataLoader.__iter__)


@dataclass(eq=False)
class _EveryNth:
    """Every n-th batch of an iterable that must be read completely."""

    batches: Iterable[Any]
    num_replicas: int
    rank: int

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.batches, (list, tuple)):
            return iter(self.batches[self.rank :: self.num_replicas])
        return islice(iterate_from(self.batches, 0), self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        total = num_batches(self.batches)
        if total is None:
            raise TypeError("the number of batches is not known")
        return len(range(self.rank, total, self.num_replicas))
