"""Samples of each label at each client, for pictures of a federation; bounded for many clients and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.federated.data.dealing import Labelled

if TYPE_CHECKING:
    from dovetail.federated.data.partition import Labels, Partition

MOST_CLIENTS, MOST_LABELS = 1000, 100


@dataclass(frozen=True)
class LabelCounts:
    """The number of samples of each label at some clients.

    Attributes:
        num_clients: The number of all clients.
        clients: The ids of the clients that are counted: all, or one in several.
        labels: The names of the labels; one empty name if the labels are unknown.
        counts: A row per client, with a number per label.
    """

    num_clients: int
    clients: tuple[int, ...]
    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    def to_plain(self) -> dict[str, Any]:
        """Return the counts as values that JSON can represent."""
        return {**vars(self)}


def some_clients(num_clients: int, most: int = MOST_CLIENTS) -> range:
    """Return all client ids, or every second, third, … one, so that there are at most `most`.

    Example:
        >>> list(some_clients(5, most=3)), len(some_clients(1_000_000))
        ([1, 3, 5], 1000)
    """
    return range(1, num_clients + 1, -(-num_clients // most))


def count_labels(partition: Partition, labels: Labels) -> LabelCounts:
    """Return the label counts of a partition. Single clients are kept, because sums of several would look balanced.

    Of many labels, the most frequent ones are kept, and the last column has all others.

    Args:
        partition: The partition.
        labels: The labels of the whole dataset.

    Raises:
        DataError: The labels are neither whole numbers nor names.

    Example:
        >>> from dovetail.federated.data.partition import Partition
        >>> count_labels(Partition.from_lists([[0, 1, 5], [3, 4]]), ["a", "a", "a", "b", "b", "b"]).counts
        ((2, 1), (0, 2))
    """
    data = Labelled.of(labels)
    clients = some_clients(len(partition))
    names = [str(name) for name in data.names]
    codes: Any = data.codes
    if len(names) > MOST_LABELS:
        totals = np.bincount(codes, minlength=len(names))
        kept = np.sort(np.argsort(-totals, kind="stable")[: MOST_LABELS - 1])
        places = np.full(len(names), MOST_LABELS - 1)
        places[kept] = np.arange(len(kept))
        codes, names = places[codes], [*(names[each] for each in kept), f"{len(names) - len(kept)} others"]
    counts = [np.bincount(codes[partition.of(client)], minlength=len(names)).tolist() for client in clients]
    return LabelCounts(len(partition), tuple(clients), tuple(names), tuple(map(tuple, counts)))


def count_samples(num_clients: int, sizes: Sequence[int]) -> LabelCounts:
    """Return the counts of `some_clients` whose labels are unknown, from their numbers of samples."""
    return LabelCounts(num_clients, tuple(some_clients(num_clients)), ("",), tuple((size,) for size in sizes))
