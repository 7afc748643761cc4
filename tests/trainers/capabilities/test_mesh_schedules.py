"""Collective calls of the processes of a mesh: every process makes the same ones in the same order.

Torch's fake process group runs one process of a group of any size. Nothing is sent, so the numbers are wrong, and
validation, which depends on messages, is left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail import Batches
from dovetail.distributed import own_part
from dovetail.trainers import FSDPTrainer, Trainer

pytestmark = [pytest.mark.slow]

Mesh = tuple[int, int, int]
# An operation, the distance and the number of the ranks of its group, and its bytes.
Call = tuple[str, int, int, int]

# Replicate, shard and tensor.
MESHES: list[Mesh] = [
    *[(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 5, 1)],
    *[(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 1, 8), (2, 2, 2), (1, 4, 2), (4, 1, 2), (3, 3, 1), (2, 3, 2), (1, 4, 4)],
    *[(4, 4, 1), (2, 2, 4), (3, 2, 4), (1, 32, 1), (4, 4, 2), (1, 8, 8), (8, 8, 1), (4, 4, 4), (2, 4, 8), (64, 1, 1)],
]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Records collective calls, with a description of the group that is the same in every process.

    Args:
        groups: The groups of the mesh by name. Torch caches decisions by mesh, so calls of one process may have the
            names of the groups of an earlier one, in the same dimension of the mesh.
    """

    def __init__(self, groups: dict[str, tuple[int, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.calls: list[Call] = []
        self._groups = groups

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(it, DTensor) for it in types):
            return NotImplemented
        leaves = tree_leaves((args, dict(kwargs or {})))
        size = sum(it.nbytes for it in leaves if isinstance(it, Tensor))
        if func.namespace == "c10d":
            boxed = next(
                it for it in leaves if isinstance(it, torch.ScriptObject) and "ProcessGroup" in str(it._type())
            )
            self.calls.append((func.__name__, *described(dist.ProcessGroup.unbox(boxed)), size))
        elif func is torch.ops._c10d_functional.all_reduce.default:
            name = args[-1]
            if name not in self._groups:
                self._groups[name] = described(distributed_c10d._resolve_process_group(name))  # type: ignore[attr-defined]  # exported, not to mypy
            self.calls.append((func.__name__, *self._groups[name], size))
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def described(group: dist.ProcessGroup) -> tuple[int, int]:
    ranks = dist.get_process_group_ranks(group)
    assert dist.get_rank() in ranks
    distances = {after - before for before, after in pairwise(ranks)} or {0}
    # In the plane of two dimensions, the distances are not equal.
    return min(distances), len(ranks)


class LocalSGD(torch.optim.Optimizer):
    """Updates the parts of this process: the operations of `DTensor` send nothing, and take a second to plan."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            own_part(parameter).sub_(own_part(parameter.grad), alpha=0.1)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.down(torch.tanh(self.up(self.norm(inputs))))
        return outputs


def schedule(rank: int, mesh: Mesh, groups: dict[str, tuple[int, int]], *, clips: bool) -> list[Call]:
    """Return the collective calls of one process in two batches, of which the last process has only one."""
    size = mesh[0] * mesh[1] * mesh[2]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        model = Net(2 * mesh[2])
        trainer = Trainer(
            model,
            "cpu",
            optimizer=LocalSGD(model.parameters()),
            batch_size=1,
            accumulation_steps=2,
            gradient_clip=1.0 if clips else 0.0,
            seed=0,
            verbose=False,
        )
        sizes = dict(zip(("replicate", "shard", "tensor"), mesh, strict=True))
        layer = FSDPTrainer(trainer, mesh=sizes, parallelize={"up": "colwise", "down": "rowwise"})
        inputs = torch.randn(max(2 * mesh[0] * mesh[1] - 1, 2), 4)
        recorder = Recorder(groups)
        with recorder:
            layer.fit((inputs, inputs[:, 0].gt(0).long()), max_length=Batches(2))
    finally:
        dist.destroy_process_group()
    return recorder.calls


def chosen_ranks(mesh: Mesh) -> list[int]:
    """Return the first process, its neighbour in each dimension, and the last process; in torture, all processes."""
    _, shard, tensor = mesh
    size = mesh[0] * shard * tensor
    if os.environ.get("DOVETAIL_TORTURE") == "1":
        return list(range(size))
    return sorted({rank for rank in (0, 1, tensor, shard * tensor, size - 1) if rank < size})


@pytest.fixture(autouse=True)
def no_decisions_for_other_meshes() -> None:
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch has no types for it
    _gen_transform_infos.cache_clear()


@pytest.mark.full_size
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_all_processes_of_a_mesh_make_the_same_calls(mesh: Mesh) -> None:
    # The norm needs a second to plan, so only some meshes clip.
    clips = mesh in ((1, 1, 2), (2, 1, 2), (2, 2, 2), (4, 4, 1), (1, 8, 8))
    groups: dict[str, tuple[int, int]] = {}
    first, *others = (schedule(rank, mesh, groups, clips=clips) for rank in chosen_ranks(mesh))
    for other in others:
        assert other == first
    # Groups of every dimension are in the schedule, besides the group of all processes.
    replicate, shard, tensor = mesh
    distances = [(shard * tensor, replicate), (tensor, shard), (1, tensor)]
    assert {it for it in distances if it[1] > 1} <= {call[1:3] for call in first}


def test_a_process_that_calls_in_another_order_would_be_found() -> None:
    groups: dict[str, tuple[int, int]] = {}
    mesh = (1, 2, 2)
    with_clipping, without = (schedule(0, mesh, groups, clips=clips) for clips in (True, False))
    assert with_clipping != without
