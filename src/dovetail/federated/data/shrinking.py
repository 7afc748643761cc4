"""Partitions in which every client keeps only a random share of its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.data.partition import Partition

_PARAMETERS = {"uniform": ("low", "high"), "normal": ("mean", "std")}


def shrunk(partition: Partition, distribution: Mapping[str, Any], seed: int = 0) -> Partition:
    """Return a partition in which each client keeps a random share of its samples, at least one.

    Args:
        partition: The samples of each client.
        distribution: The share: `{"distribution": "uniform", "low": …, "high": …}`, or `"normal"` with `mean` and
            `std`; shares above 1 count as 1.
        seed: The seed of the shares and of the samples that are kept.

    Raises:
        ConfigError: The distribution is unknown, or its parameters are others.

    Example:
        >>> whole = Partition.from_lists([range(10), range(10, 20)])
        >>> shrunk(whole, {"distribution": "uniform", "low": 0.5, "high": 0.5}).sizes
        tensor([5, 5])
    """
    kept = []
    for client_id, indices in enumerate(partition, start=1):
        # The last number keeps these draws apart from the samples that `sources.py` holds out, which use 1.
        rng = np.random.default_rng((seed, client_id, 2))
        size = min(len(indices), max(1, int(_share(distribution, rng) * len(indices))))
        order = torch.from_numpy(rng.permutation(len(indices))[:size])
        kept.append(indices[order.sort().values])
    return Partition.from_lists(kept)


def _share(distribution: Mapping[str, Any], rng: np.random.Generator) -> float:
    kind = str(distribution.get("distribution", "")).lower()
    if kind not in _PARAMETERS:
        raise UnknownNameError("partition_distribution", kind, _PARAMETERS)
    # plato calls the deviation of the normal distribution `high`.
    given = {"std" if kind == "normal" and name == "high" else name: it for name, it in distribution.items()}
    needed = _PARAMETERS[kind]
    if given.keys() != {"distribution", *needed}:
        raise ConfigError(f"partition_distribution: {kind} needs {' and '.join(needed)}, got {dict(distribution)}")
    for name in needed:
        is_number = isinstance(given[name], (int, float)) and not isinstance(given[name], bool)
        if not is_number or not math.isfinite(given[name]):
            raise ConfigError(f"partition_distribution: expected a number as {name}, got {given[name]!r}")
    first, second = (float(given[name]) for name in needed)
    if (kind == "uniform" and first > second) or (kind == "normal" and second < 0):
        raise ConfigError(f"partition_distribution: expected low at most high, and std at least 0, got {dict(given)}")
    drawn = rng.uniform(first, second) if kind == "uniform" else rng.normal(first, second)
    return float(np.clip(drawn, 0.0, 1.0))
