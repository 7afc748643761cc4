"""Partitions of a labelled dataset over the clients of a federation.

Every function takes the labels of a dataset and the number of clients, is a function of its seed, and gives no sample
to two clients, unless `overlap` is set. Functions that do not use labels also accept the number of samples.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dovetail.errors import ConfigError, DataError, UnknownNameError, expect
from dovetail.federated.data.dealing import (
    Ints,
    Labelled,
    Labels,
    at_least,
    deal_shares,
    draw_by_label,
    draw_labels,
    listed,
    owners_by_label,
    owners_by_size,
    proportions,
)
from dovetail.federated.data.partition_plot import figure_of
from dovetail.registry import Registry

__all__ = [
    "Labels",
    "Partition",
    "all_inclusive",
    "dirichlet",
    "distribution",
    "iid",
    "label_quantity",
    "make_partition",
    "mixed",
    "mixed_label_quantity",
    "option_names",
    "orthogonal",
    "partitions",
    "plot",
    "sample_quantity",
    "shards",
]


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of each client. Client ids count from 1; iteration yields the samples of client after client.

    Clients are runs of one tensor, so a partition over a hundred thousand clients is three tensors, and clients that
    have the same samples can share a run.

    Attributes:
        indices: The samples of the clients, run after run.
        starts: The position of the run of each client.
        sizes: The number of samples of each client.

    Example:
        >>> partition = Partition.from_lists([[0, 1, 5], [3, 4]])
        >>> len(partition), partition.of(2), partition.sizes
        (2, tensor([3, 4]), tensor([3, 2]))
        >>> partition.table(["a", "a", "a", "b", "b", "b"])
        tensor([[2, 1],
                [0, 2]])
    """

    indices: Tensor
    starts: Tensor
    sizes: Tensor

    @classmethod
    def from_lists(cls, clients: Iterable[Sequence[int] | Tensor | npt.NDArray[Any]]) -> Partition:
        """Return the partition that gives each client the samples listed for it."""
        runs = []
        for client_id, samples in enumerate(clients, 1):
            run = torch.as_tensor(samples)
            if run.ndim != 1 or (len(run) and (run.is_floating_point() or run.dtype is torch.bool)):
                raise DataError(
                    f"client {client_id}: expected a one-dimensional array of sample indices, "
                    f"got shape {tuple(run.shape)} of type {run.dtype}"
                )
            runs.append(run.to(torch.int64))
        if not runs:
            raise ConfigError("partition: expected at least one client, got none")
        return cls._of_runs(torch.cat(runs), torch.tensor([len(run) for run in runs]))

    @classmethod
    def _of_runs(cls, indices: Tensor, sizes: Tensor) -> Partition:
        return cls(indices, sizes.cumsum(0) - sizes, sizes)

    @classmethod
    def _of_owners(cls, owners: Ints, num_clients: int) -> Partition:
        order = np.argsort(owners, kind="stable")
        owned = order[np.count_nonzero(owners < 0) :]
        sizes = np.bincount(owners[owned], minlength=num_clients)
        return cls._of_runs(torch.from_numpy(owned), torch.from_numpy(sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.of(client_id) for client_id in range(1, len(self) + 1))

    def of(self, client_id: int) -> Tensor:
        """Return the samples of one client as int64, a copy.

        Args:
            client_id: The client, counted from 1.
        """
        if not 1 <= client_id <= len(self):
            raise ConfigError(f"client {client_id}: the ids of this partition go from 1 to {len(self)}")
        start, size = int(self.starts[client_id - 1]), int(self.sizes[client_id - 1])
        return self.indices[start : start + size].clone()

    def table(self, labels: Labels) -> Tensor:
        """Return the number of samples of each label at each client.

        Args:
            labels: The labels of the whole dataset.

        Returns:
            Counts, with a row per client and a column per label in ascending order.
        """
        data = Labelled.of(labels)
        if len(self.indices) and (last := int(self.indices.max())) >= len(data):
            raise DataError(f"labels: expected the labels of the whole dataset, at least {last + 1}, got {len(data)}")
        # Runs that clients share are counted once.
        (starts, sizes), which = torch.unique(torch.stack([self.starts, self.sizes]), dim=1, return_inverse=True)
        run = torch.arange(len(sizes)).repeat_interleave(sizes)
        place = torch.arange(len(run)) + (starts - sizes.cumsum(0) + sizes)[run]
        codes = torch.from_numpy(data.codes)[self.indices[place]]
        counts = (run * len(data.names) + codes).bincount(minlength=len(sizes) * len(data.names))
        return counts.view(len(sizes), -1)[which]


def iid(
    labels: Labels | int,
    num_clients: int,
    *,
    partition_size: int | None = None,
    overlap: bool = False,
    seed: int = 0,
) -> Partition:
    """Distribute all samples at random; the sizes of clients differ by at most one.

    Args:
        labels: The labels of the dataset, or its number of samples.
        num_clients: Number of clients.
        partition_size: The number of samples per client. None means to use all samples.
        overlap: Draw the samples of each client from the whole dataset, so that clients may share samples.
        seed: The seed of the random numbers.

    Example:
        >>> iid(10, 3).sizes
        tensor([4, 3, 3])
    """
    num_samples, rng = _num_samples(labels), _generator(seed)
    if overlap:
        return _overlapping(
            num_samples, num_clients, partition_size, seed, lambda rng, size: rng.permutation(num_samples)[:size]
        )
    _check_at_least_one(partition_size=1 if partition_size is None else partition_size)
    _check_room(num_samples, num_clients, partition_size or 1)
    used = num_samples if partition_size is None else num_clients * partition_size
    owners = np.full(num_samples, -1)
    owners[rng.permutation(num_samples)[:used]] = np.arange(used) % num_clients
    return Partition._of_owners(owners, num_clients)


def dirichlet(
    labels: Labels,
    num_clients: int,
    *,
    alpha: float = 1.0,
    min_samples: int = 1,
    partition_size: int | None = None,
    overlap: bool = False,
    seed: int = 0,
) -> Partition:
    """Divide each label over the clients by proportions that are drawn from a Dirichlet distribution.

    Args:
        labels: The labels of the dataset.
        num_clients: Number of clients.
        alpha: Concentration: small gives each client few labels, large makes all alike.
        min_samples: The smallest number of samples of a client; clients with more samples give some away.
        partition_size: Samples per client. The proportions then apply to the labels of each client.
        overlap: Draw the samples of each client from the whole dataset, so that clients may share samples.
        seed: The seed of the random numbers.

    Example:
        >>> partition = dirichlet([0, 1] * 50, 4, alpha=0.1)
        >>> int(partition.sizes.sum()), int(partition.sizes.min()) >= 1
        (100, True)
    """
    data, rng = Labelled.of(labels), _generator(seed)
    _check_positive(alpha=alpha)
    if overlap:
        return _overlapping(
            len(data), num_clients, partition_size, seed, lambda rng, size: draw_by_label(data, alpha, size, rng)
        )
    if partition_size is not None:
        _check_at_least_one(partition_size=partition_size)
        _check_room(len(data), num_clients, partition_size)
        return Partition._of_owners(owners_by_size(data, np.full(num_clients, partition_size), alpha, rng), num_clients)
    _check_room(len(data), num_clients, min_samples)
    owners = np.empty(len(data), dtype=np.int64)
    for members in data.members(rng):
        owners[members] = deal_shares(len(members), proportions(rng, np.full(num_clients, alpha)))
    return Partition._of_owners(at_least(min_samples, owners, num_clients, rng), num_clients)


def shards(labels: Labels, num_clients: int, *, shards_per_client: int = 2, seed: int = 0) -> Partition:
    """Sort the samples by label, cut them into equal shards, and deal these out (McMahan et al., 2017).

    Args:
        labels: The labels of the dataset.
        num_clients: Number of clients.
        shards_per_client: Shards that each client gets.
        seed: The seed of the random numbers.

    Example:
        >>> shards([0, 0, 1, 1, 2, 2, 3, 3], 2).table([0, 0, 1, 1, 2, 2, 3, 3]).sum(dim=1)
        tensor([4, 4])
    """
    data, rng = Labelled.of(labels), _generator(seed)
    _check_at_least_one(shards_per_client=shards_per_client)
    _check_room(len(data), num_clients, shards_per_client)
    num_shards = num_clients * shards_per_client
    owner_of = rng.permutation(num_shards) % num_clients
    owners = np.empty(len(data), dtype=np.int64)
    owners[np.concatenate(data.members(rng))] = owner_of[np.arange(len(data)) * num_shards // len(data)]
    return Partition._of_owners(owners, num_clients)


def label_quantity(labels: Labels, num_clients: int, *, classes_per_client: int = 2, seed: int = 0) -> Partition:
    """Give each client the same number of labels; clients with a label have equal numbers of its samples.

    If there are fewer clients than labels, the samples of labels without a client are left out.

    Args:
        labels: The labels of the dataset.
        num_clients: Number of clients.
        classes_per_client: Labels that each client has.
        seed: The seed of the random numbers.

    Example:
        >>> labels = [0, 1, 2, 3] * 10
        >>> (label_quantity(labels, 6, classes_per_client=2).table(labels) > 0).sum(dim=1)
        tensor([2, 2, 2, 2, 2, 2])
    """
    data, rng = Labelled.of(labels), _generator(seed)
    _check_room(len(data), num_clients, 1)
    most = len(data.names)
    if not 1 <= classes_per_client <= most:
        raise ConfigError(f"classes_per_client: expected 1 to {most}, the number of labels, got {classes_per_client}")
    held = draw_labels(np.arange(most), num_clients, classes_per_client, rng)
    return Partition._of_owners(owners_by_label(data, held, rng), num_clients)


def mixed_label_quantity(
    labels: Labels,
    num_clients: int,
    *,
    anchor_classes: Sequence[Any],
    num_anchored: int,
    kept_anchors: int = 0,
    seed: int = 0,
) -> Partition:
    """Give some random clients the same labels, and each other client as many of the remaining labels.

    Args:
        labels: The labels of the dataset.
        num_clients: Number of clients.
        anchor_classes: The labels that the chosen clients have in common.
        num_anchored: The number of clients with these labels.
        kept_anchors: The number of these labels, the first ones, that other clients may have, too.
        seed: The seed of the random numbers.

    Example:
        >>> labels = [0, 1, 2, 3, 4] * 8
        >>> cut = mixed_label_quantity(labels, 4, anchor_classes=[1, 3], num_anchored=2)
        >>> sorted(cut.table(labels)[:, 1].tolist())
        [0, 0, 4, 4]
    """
    data, rng = Labelled.of(labels), _generator(seed)
    _check_room(len(data), num_clients, 1)
    anchors = data.codes_of(anchor_classes, "anchor_classes")
    if not len(anchors) or len(np.unique(anchors)) < len(anchors):
        raise ConfigError(f"anchor_classes: expected one label or more, each once, got {list(anchor_classes)}")
    expect(0 <= num_anchored <= num_clients, "num_anchored", f"0 to {num_clients}, the number of clients", num_anchored)
    if not 0 <= kept_anchors <= len(anchors):
        raise ConfigError(f"kept_anchors: expected 0 to {len(anchors)}, the number of anchors, got {kept_anchors}")
    pool = np.setdiff1d(np.arange(len(data.names)), anchors[kept_anchors:])
    chosen = rng.permutation(num_clients)
    held = np.empty((num_clients, len(anchors)), dtype=np.int64)
    held[chosen[:num_anchored]] = anchors
    if num_anchored < num_clients:
        if len(anchors) > len(pool):
            raise ConfigError(
                f"anchor_classes: expected at most {len(pool)}, as many as there are labels for the other clients, "
                f"got {len(anchors)}"
            )
        held[chosen[num_anchored:]] = draw_labels(pool, num_clients - num_anchored, len(anchors), rng)
    return Partition._of_owners(owners_by_label(data, held, rng), num_clients)


def sample_quantity(
    labels: Labels | int, num_clients: int, *, size_alpha: float = 1.0, min_samples: int = 1, seed: int = 0
) -> Partition:
    """Deal out all samples at random, in numbers that are drawn from a Dirichlet distribution.

    Args:
        labels: The labels of the dataset, or its number of samples.
        num_clients: Number of clients.
        size_alpha: Concentration of the sizes: small gives a few clients nearly everything.
        min_samples: The smallest number of samples of a client; clients with more samples give some away.
        seed: The seed of the random numbers.

    Example:
        >>> int(sample_quantity(1000, 20, size_alpha=0.3, min_samples=5).sizes.min())
        5
    """
    num_samples, rng = _num_samples(labels), _generator(seed)
    _check_positive(size_alpha=size_alpha)
    _check_room(num_samples, num_clients, min_samples)
    owners = np.empty(num_samples, dtype=np.int64)
    owners[rng.permutation(num_samples)] = deal_shares(num_samples, proportions(rng, np.full(num_clients, size_alpha)))
    return Partition._of_owners(at_least(min_samples, owners, num_clients, rng), num_clients)


def mixed(
    labels: Labels,
    num_clients: int,
    *,
    non_iid_clients: int | Sequence[int],
    alpha: float = 1.0,
    min_samples: int = 1,
    seed: int = 0,
) -> Partition:
    """Partition one part of the data like `dirichlet`, for some clients, and the rest like `iid`.

    Args:
        labels: The labels of the dataset.
        num_clients: Number of clients.
        non_iid_clients: Ids of the clients whose labels are skewed, or how many, which means the first ones.
        alpha: The concentration of their labels.
        min_samples: The smallest number of samples of each of them.
        seed: The seed of the random numbers.

    Example:
        >>> labels = [0, 1] * 50
        >>> mixed(labels, 4, non_iid_clients=[2, 3]).sizes[[0, 3]]
        tensor([25, 25])
    """
    data, rng = Labelled.of(labels), _generator(seed)
    _check_room(len(data), num_clients, max(1, min_samples))
    skewed = list(range(1, non_iid_clients + 1)) if isinstance(non_iid_clients, int) else sorted(set(non_iid_clients))
    is_negative = isinstance(non_iid_clients, int) and non_iid_clients < 0
    if is_negative or any(not 1 <= client_id <= num_clients for client_id in skewed):
        raise ConfigError(f"non_iid_clients: expected ids from 1 to {num_clients} or a number, got {non_iid_clients}")
    fair = sorted(set(range(1, num_clients + 1)).difference(skewed))
    order = rng.permutation(len(data))
    cut = len(data) * len(skewed) // num_clients
    owners = np.empty(len(data), dtype=np.int64)
    if fair:
        owners[order[cut:]] = np.resize(np.array(fair) - 1, len(data) - cut)
    if skewed:
        own_seed = int(rng.integers(2**63))
        part = dirichlet(data.codes[order[:cut]], len(skewed), alpha=alpha, min_samples=min_samples, seed=own_seed)
        owners[order[part.indices.numpy()]] = np.repeat(np.array(skewed) - 1, part.sizes.numpy())
    return Partition._of_owners(owners, num_clients)


def orthogonal(
    labels: Labels,
    num_clients: int,
    *,
    num_groups: int | None = None,
    class_groups: Sequence[Sequence[Any]] | None = None,
    seed: int = 0,
) -> Partition:
    """Put clients into groups with no label in common; inside a group, samples are dealt out at random.

    Args:
        labels: The labels of the dataset.
        num_clients: Number of clients; they are dealt out over the groups one by one.
        num_groups: Number of groups, each with its run of the labels in ascending order. None means the largest
            possible number: one per client, if there are enough labels.
        class_groups: The labels of each group, instead of runs; labels that none has are left out.
        seed: The seed of the random numbers.

    Example:
        >>> labels = [0, 1, 2, 3] * 5
        >>> orthogonal(labels, 2).table(labels)
        tensor([[5, 5, 0, 0],
                [0, 0, 5, 5]])
    """
    data, rng = Labelled.of(labels), _generator(seed)
    _check_room(len(data), num_clients, 1)
    if class_groups is None:
        most = min(num_clients, len(data.names))
        if num_groups is not None and not 1 <= num_groups <= most:
            raise ConfigError(f"num_groups: expected 1 to {most}, the fewer of clients and labels, got {num_groups}")
        groups = np.array_split(np.arange(len(data.names)), num_groups or most)
    else:
        groups = [data.codes_of(group, "class_groups") for group in class_groups]
        if not 1 <= len(groups) <= num_clients:
            raise ConfigError(f"class_groups: expected 1 to {num_clients} groups, one per client, got {len(groups)}")
        codes, times = np.unique(np.concatenate(groups), return_counts=True)
        if any(times > 1):
            label = data.names[codes[times > 1][0]]
            raise ConfigError(f"class_groups: expected every label at most once, got {label} twice")
    owners = np.full(len(data), -1)
    for number, group in enumerate(groups):
        members = rng.permutation(np.flatnonzero(np.isin(data.codes, group)))
        clients = np.arange(number, num_clients, len(groups))
        _check_room(len(members), len(clients), 1, f"the labels {listed(data.names[group])} have")
        owners[members] = np.resize(clients, len(members))
    return Partition._of_owners(owners, num_clients)


def all_inclusive(labels: Labels | int, num_clients: int, *, seed: int = 0) -> Partition:
    """Give every client all samples.

    Args:
        labels: The labels of the dataset, or its number of samples.
        num_clients: Number of clients.
        seed: Has no effect; it exists because all partitions have one.

    Example:
        >>> all_inclusive(3, 1_000_000).of(7)
        tensor([0, 1, 2])
    """
    num_samples, _ = _num_samples(labels), _generator(seed)
    _check_at_least_one(num_clients=num_clients)
    starts = torch.zeros(num_clients, dtype=torch.int64)
    return Partition(torch.arange(num_samples), starts, torch.full_like(starts, num_samples))


def distribution(
    labels: Labels,
    num_clients: int,
    *,
    alpha: float = 1.0,
    size_alpha: float = 1.0,
    min_samples: int = 1,
    seed: int = 0,
) -> Partition:
    """Draw the sizes of the clients from one Dirichlet distribution, and the labels of each from another.

    Sizes are exact and all samples are used. When a label runs out, clients get other labels than they drew.

    Args:
        labels: The labels of the dataset.
        num_clients: Number of clients.
        alpha: Concentration of labels around the distribution of the whole dataset.
        size_alpha: Concentration of sizes.
        min_samples: The smallest number of samples of a client; clients with more samples give some away.
        seed: The seed of the random numbers.

    Example:
        >>> distribution([0, 1] * 50, 4, alpha=0.1, size_alpha=5.0).sizes.sum()
        tensor(100)
    """
    data, rng = Labelled.of(labels), _generator(seed)
    _check_positive(alpha=alpha, size_alpha=size_alpha)
    _check_room(len(data), num_clients, min_samples)
    owners = deal_shares(len(data), proportions(rng, np.full(num_clients, size_alpha)))
    sizes = np.bincount(at_least(min_samples, owners, num_clients, rng), minlength=num_clients)
    return Partition._of_owners(owners_by_size(data, sizes, alpha, rng), num_clients)


def _by_name() -> Mapping[str, Callable[..., Partition]]:
    ours = {
        each.__name__: each
        for each in (
            iid,
            dirichlet,
            shards,
            label_quantity,
            mixed_label_quantity,
            sample_quantity,
            mixed,
            orthogonal,
            all_inclusive,
            distribution,
        )
    }
    return ours | {
        "noniid": dirichlet,
        "distribution_noniid": distribution,
        "label_quantity_noniid": label_quantity,
        "mixed_label_quantity_noniid": mixed_label_quantity,
        "sample_quantity_noniid": sample_quantity,
    }


partitions: Registry[Callable[..., Partition]] = Registry("partition", _by_name)

# Plato's names of the options, with our names.
_SPELLINGS = {
    "concentration": "alpha",
    "label_concentration": "alpha",
    "client_quantity_concentration": "size_alpha",
    "min_partition_size": "min_samples",
    "per_client_classes_size": "classes_per_client",
    "consistent_clients_size": "num_anchored",
    "keep_anchor_classes_size": "kept_anchors",
    "random_seed": "seed",
    "total_silos": "num_groups",
}


def make_partition(name: str, labels: Labels | int, num_clients: int, **options: Any) -> Partition:
    """Return the partition of a dataset by name; name and options may be ours or plato's.

    Args:
        name: One of `partitions`.
        labels: The labels of the dataset, or its number of samples where labels play no role.
        num_clients: Number of clients.
        options: Keyword arguments of that partition.

    Raises:
        UnknownNameError: There is no such partition, or it has no such option.

    Example:
        >>> make_partition("noniid", [0, 1] * 50, 4, concentration=0.5, random_seed=3).sizes.sum()
        tensor(100)
    """
    function = partitions.get(name)
    known = _options(function)
    given: dict[str, Any] = {}
    for spelled, value in options.items():
        option = option_of(spelled)
        if option not in known:
            raise UnknownNameError(f"option of the partition {name!r}", spelled, known)
        if option in given:
            raise ConfigError(f"partition {name!r}: the option {option} is given twice, once as {spelled}")
        given[option] = value
    missing = [each.name for each in known.values() if each.default is each.empty and each.name not in given]
    if missing:
        raise ConfigError(f"partition {name!r}: needs the option {missing[0]}")
    return function(labels, num_clients, **given)


def option_of(spelling: str) -> str:
    """Return our name of a partition's option that plato may spell otherwise.

    Example:
        >>> option_of("concentration"), option_of("min_samples")
        ('alpha', 'min_samples')
    """
    return _SPELLINGS.get(spelling, spelling)


def option_names(name: str) -> list[str]:
    """Return the options of a partition except `seed`, with our names and plato's.

    Example:
        >>> option_names("label_quantity_noniid")
        ['classes_per_client', 'per_client_classes_size']
    """
    known = _options(partitions.get(name))
    return sorted(
        {*known, *(spelling for spelling, option in _SPELLINGS.items() if option in known)} - {"seed", "random_seed"}
    )


def _options(function: Callable[..., Partition]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}


def plot(partition: Partition, labels: Labels, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the number of samples of each label at each client.

    A few clients are bars, each label a colour. Many clients, or labels, are rows and columns of one picture, in which
    the colour says what share of a client's samples has the label.

    Args:
        partition: The partition.
        labels: The labels of the whole dataset.
        path: The file to write; its suffix (`.png`, `.svg`, `.pdf`) is the format. None means no file.

    Returns:
        The figure of matplotlib.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = figure_of(partition.table(labels).numpy(), [str(name) for name in Labelled.of(labels).names])
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def _overlapping(
    num_samples: int,
    num_clients: int,
    partition_size: int | None,
    seed: int,
    draw: Callable[[np.random.Generator, int], Ints],
) -> Partition:
    """Return a partition whose clients draw independently, each with a generator of the seed and its id."""
    if partition_size is None:
        raise ConfigError("overlap: clients that draw from the whole dataset need a partition_size")
    _check_at_least_one(num_clients=num_clients, partition_size=partition_size)
    _check_room(num_samples, 1, partition_size)
    clients = range(1, num_clients + 1)
    return Partition.from_lists(np.sort(draw(_generator(seed, client_id), partition_size)) for client_id in clients)


def _generator(*seeds: int) -> np.random.Generator:
    if any(seed < 0 for seed in seeds):
        raise ConfigError(f"seed: expected 0 or more, got {min(seeds)}")
    return np.random.default_rng(seeds)


def _num_samples(labels: Labels | int) -> int:
    count = int(labels) if isinstance(labels, (int, np.integer)) else len(labels)
    if count < 1:
        raise DataError(f"labels: expected at least one sample, got {count}")
    return count


def _check_room(num_samples: int, num_clients: int, each: int, of_what: str = "the dataset has") -> None:
    _check_at_least_one(num_clients=num_clients)
    if each < 0:
        raise ConfigError(f"samples per client: expected 0 or more, got {each}")
    if num_samples < num_clients * each:
        raise DataError(
            f"{num_clients} clients with {each} or more samples each need {num_clients * each}, "
            f"and {of_what} {num_samples}"
        )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        expect(0 < value < float("inf"), name, "a number above 0", value)


def _check_at_least_one(**values: int) -> None:
    for name, value in values.items():
        expect(value >= 1, name, "1 or more", value)
