"""Processes that hold the state of a run in parts, and their connections for a thread that writes checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.distributed import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PartHolders:
    """The processes that hold the state of a run in parts."""

    def __init__(self, group: Group, mesh: DeviceMesh) -> None:
        self.rank, self.size = group.rank, group.size
        self.exchange = group.exchange
        self._group, self._mesh = group, mesh
        self._background: PartHolders | None = None

    def in_background(self) -> PartHolders:
        """Return the same processes for a thread, with connections of its own."""
        if self._background is None:
            self._background = PartHolders(_ThreadGroup(self._group), self._mesh)
        return self._background

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that is sharded by rows, like FSDP's parameters."""
        from torch.distributed.tensor import Replicate, Shard, zeros

        names = self._mesh.mesh_dim_names or ()
        # Over all dimensions except the copies, so that no process holds more than its part of a checkpoint.
        placements = [Shard(0) if len(shape) and name != "replicate" else Replicate() for name in names]
        return zeros(*shape, dtype=dtype, device_mesh=self._mesh, placements=placements)


class _ThreadGroup(Group):
    """The processes of a group over other connections, so that a thread can exchange messages while training does.

    Args:
        group: The group. All of its processes must create this object.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group._store, dist.new_group(backend="gloo"))
