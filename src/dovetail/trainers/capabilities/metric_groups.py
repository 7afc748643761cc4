"""Process groups of torchmetrics objects in a run whose processes compute the same batches."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from dovetail.distributed import Group

# By the number of processes that compute the same batches. Weak, because a group that outlives the run leaves threads.
_GROUPS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class MetricGroups:
    """Sets the process group of the torchmetrics objects of a run, so that they count each sample once.

    These objects synchronise themselves over all processes. With tensor parallelism, several processes compute the same
    batches. An object therefore gets a group with one process for each part of the data.
    """

    def __init__(self) -> None:
        self._changed: list[Any] = []

    def set(self, group: Group, metrics: Iterable[Any]) -> None:
        """Set the groups; an object with a group of its user keeps it. A collective call."""
        # Not imported here, because the import takes seconds, and a run without it has none of its objects.
        torchmetrics = sys.modules.get("torchmetrics")
        if group is group.everyone or torchmetrics is None:
            return
        # A collection has several of them, and some have others inside.
        parts = [it for metric in metrics if isinstance(metric, nn.Module) for it in metric.modules()]
        self._changed = [it for it in parts if isinstance(it, torchmetrics.Metric) and it.process_group is None]
        if self._changed:
            own = _group_of_one_per_part(group)
            for metric in self._changed:
                metric.process_group = own

    def restore(self) -> None:
        """Restore the objects, which could not be pickled with a group."""
        for metric in self._changed:
            metric.process_group = None
        self._changed = []


def _group_of_one_per_part(group: Group) -> Any:
    """Return this process's group of processes that have different batches."""
    size = group.everyone.size
    num_alike = size // group.size
    known: Any = dist.distributed_c10d._world.pg_map
    own = _GROUPS.get(num_alike)
    if own is None or own not in known:
        ranks = [list(range(first, size, num_alike)) for first in range(num_alike)]
        # Without a type in torch.
        make: Any = dist.new_subgroups_by_enumeration
        own, _ = make(ranks)
        _GROUPS[num_alike] = own
    return own
