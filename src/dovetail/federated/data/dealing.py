"""Assignment of samples to clients, for the partitions of `partition.py`.

`owners` has one number per sample: its client, counted from 0, or -1 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dovetail.errors import ConfigError, DataError

Labels: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[Any]"
Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Labelled:
    """The labels of a dataset: their distinct values in ascending order, and for each sample which it is."""

    names: npt.NDArray[Any]
    codes: Ints

    @classmethod
    def of(cls, labels: Labels) -> Labelled:
        """Return the labels of a dataset, checked."""
        values = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if values.ndim != 1 or values.dtype.kind not in "biuUS":
            raise DataError(
                "labels: expected a one-dimensional array of whole numbers or names, one per sample, "
                f"got shape {values.shape} of type {values.dtype}"
            )
        if not len(values):
            raise DataError("labels: expected at least one sample, got none")
        names, codes = np.unique(values, return_inverse=True)
        return cls(names, codes)

    def __len__(self) -> int:
        return len(self.codes)

    def members(self, rng: np.random.Generator) -> list[Ints]:
        """Return the samples of each label, in random order."""
        order = rng.permutation(len(self))
        order = order[np.argsort(self.codes[order], kind="stable")]
        return np.split(order, np.bincount(self.codes, minlength=len(self.names)).cumsum()[:-1])

    def codes_of(self, names: Sequence[Any], option: str) -> Ints:
        """Return the codes of labels that an option names."""
        known = {name: code for code, name in enumerate(self.names.tolist())}
        for name in names:
            if name not in known:
                raise ConfigError(f"{option}: the dataset has no label {name!r}; it has {listed(self.names)}")
        return np.array([known[name] for name in names], dtype=np.int64)


def deal_shares(count: int, shares: Floats) -> Ints:
    """Return the owners of `count` samples: client k owns a run whose length is its share of `count`."""
    cuts = np.floor(np.cumsum(shares)[:-1] * count)
    return np.searchsorted(cuts, np.arange(count), side="right")


def proportions(rng: np.random.Generator, alphas: Floats) -> Floats:
    """Draw from a Dirichlet distribution."""
    # The sum of the alphas must stay finite. Proportions of larger alphas are equal to nine digits anyway.
    return rng.dirichlet(np.clip(alphas, 1e-12, 1e18)) if len(alphas) > 1 else np.ones(1)


def at_least(min_samples: int, owners: Ints, num_clients: int, rng: np.random.Generator) -> Ints:
    """Return owners with at least `min_samples` each: the largest clients give away random samples."""
    sizes = np.bincount(owners, minlength=num_clients)
    lacking = np.maximum(min_samples - sizes, 0)
    num_moved = int(lacking.sum())
    if num_moved == 0:
        return owners
    # The lowest level at which cutting all sizes to it frees no more than is needed. The rest is taken one by one from
    # clients at the level.
    low, high = min_samples, int(sizes.max())
    while low < high:
        level = (low + high) // 2
        low, high = (low, level) if np.maximum(sizes - level, 0).sum() <= num_moved else (level + 1, high)
    given = np.maximum(sizes - low, 0)
    at_level = np.flatnonzero(sizes - given == low)
    given[rng.permutation(at_level)[: num_moved - int(given.sum())]] += 1

    # The samples of each client in random order, client after client; its first `given` samples are moved.
    order = rng.permutation(len(owners))
    order = order[np.argsort(owners[order], kind="stable")]
    rank = np.arange(len(owners)) - np.repeat(sizes.cumsum() - sizes, sizes)
    moved = order[rank < np.repeat(given, sizes)]
    owners = owners.copy()
    owners[rng.permutation(moved)] = np.repeat(np.arange(num_clients), lacking)
    return owners


def owners_by_size(data: Labelled, sizes: Ints, alpha: float, rng: np.random.Generator) -> Ints:
    """Return owners such that clients have given sizes, with label proportions that each client draws."""
    available = np.bincount(data.codes, minlength=len(data.names))
    # Centered at the label shares of the dataset, so that the sum of all requests is close to what is available.
    mixes = rng.dirichlet(np.clip(alpha * len(available) * available / len(data), 1e-12, 1e18), size=len(sizes))
    wanted = rng.multinomial(sizes, mixes).ravel()
    num_clients, num_labels = len(sizes), len(available)
    client = np.repeat(np.repeat(np.arange(num_clients), num_labels), wanted)
    label = np.repeat(np.tile(np.arange(num_labels), num_clients), wanted)
    owners = np.full(len(data), -1)
    unserved, unused = [], []
    for code, members in enumerate(data.members(rng)):
        takers = rng.permutation(client[label == code])
        served = min(len(takers), len(members))
        owners[members[:served]] = takers[:served]
        unserved.append(takers[served:])
        unused.append(members[served:])
    # Requests for labels that ran out get random samples of the labels that are left, so that sizes are exact.
    left = np.concatenate(unserved)
    owners[rng.permutation(np.concatenate(unused))[: len(left)]] = left
    return owners


def draw_by_label(data: Labelled, alpha: float, count: int, rng: np.random.Generator) -> Ints:
    """Draw samples without replacement, weighted by their labels: the samples with the smallest exponential times."""
    weights = proportions(rng, np.full(len(data.names), alpha))
    clocks = rng.exponential(size=len(data)) / np.maximum(weights[data.codes], 1e-300)
    return np.argpartition(clocks, count - 1)[:count]


def draw_labels(pool: Ints, num_clients: int, count: int, rng: np.random.Generator) -> Ints:
    """Return `count` different labels for each client: the first one in turn, so that all are used, then any."""
    pool = rng.permutation(pool)
    hands = np.empty((num_clients, count), dtype=np.int64)
    # Some clients at a time, since each draws a number for each label.
    for clients in np.array_split(np.arange(num_clients), 1 + num_clients * len(pool) // 10_000_000):
        first = clients[:, None] % len(pool)
        others = rng.random((len(clients), len(pool) - 1)).argsort(axis=1)[:, : count - 1]
        hands[clients] = pool[np.concatenate([first, (first + 1 + others) % len(pool)], axis=1)]
    return hands


def owners_by_label(data: Labelled, held: Ints, rng: np.random.Generator) -> Ints:
    """Divide the samples of each label over the clients that hold it; samples of other labels are left out."""
    owners = np.full(len(data), -1)
    for code, members in enumerate(data.members(rng)):
        holders = rng.permutation(np.flatnonzero((held == code).any(axis=1)))
        if len(holders) > len(members):
            name = data.names[code].item()
            raise DataError(f"label {name!r} has {len(members)} samples for {len(holders)} clients that are to have it")
        if len(holders):
            owners[members] = np.resize(holders, len(members))
    return owners


def listed(names: npt.NDArray[Any]) -> str:
    """Return labels for a sentence, the first ones of many."""
    shown = [str(name) for name in names[:10].tolist()]
    return ", ".join(shown) + (", …" if len(names) > 10 else "")
