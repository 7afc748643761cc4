"""Sizes of meshes, and what is said about a mesh or a plan that cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.trainers import AMPTrainer, DDPTrainer, FSDPTrainer, Trainer
from dovetail.trainers.capabilities.meshes import mesh_sizes
from dovetail.trainers.memory_plan import plan_memory


def trainer() -> Trainer:
    return Trainer(nn.Linear(2, 2), "cpu", verbose=False)


@pytest.mark.parametrize(
    ("mesh", "size", "expected"),
    [
        (None, 6, {"shard": 6}),
        ({"replicate": 2, "shard": 3}, 6, {"replicate": 2, "shard": 3}),
        ({"replicate": 2, "shard": -1}, 6, {"replicate": 2, "shard": 3}),
        ({"replicate": 1, "shard": -1}, 6, {"shard": 6}),
        ({"replicate": -1, "shard": 1, "tensor": 2}, 6, {"replicate": 3, "shard": 1, "tensor": 2}),
        ({"replicate": 1, "shard": 1, "tensor": 6}, 6, {"shard": 1, "tensor": 6}),
    ],
)
def test_a_size_of_minus_one_is_the_rest_of_the_processes(mesh: Any, size: int, expected: dict[str, int]) -> None:
    assert mesh_sizes(mesh, size) == expected


@pytest.mark.parametrize(
    "mesh", [{}, {"rows": 2}, {"shard": 0}, {"shard": 1.5}, {"tensor": True}, {"replicate": -1, "shard": -1}, [2, 2]]
)
def test_a_mesh_that_is_not_counts_is_rejected(mesh: Any) -> None:
    with pytest.raises(ConfigError, match="mesh: expected the sizes of 'replicate', 'shard' and 'tensor', such as"):
        FSDPTrainer(trainer(), mesh=mesh)


@pytest.mark.parametrize("plan", [3, {}, {1: "colwise"}, "colwise"])
def test_a_plan_of_a_wrong_type_is_rejected(plan: Any) -> None:
    with pytest.raises(ConfigError, match="parallelize: expected a function of a model and its mesh, a dict"):
        FSDPTrainer(trainer(), mesh={"tensor": 2}, parallelize=plan)


def test_a_plan_without_tensor_parallelism_is_rejected() -> None:
    with pytest.raises(ConfigError, match="parallelize: the mesh has no 'tensor'"):
        FSDPTrainer(trainer(), mesh={"shard": 2}, parallelize={"0": "colwise"})


@pytest.mark.parametrize("option", [{"mesh": {"replicate": 2}}, {"parallelize": {"0": "colwise"}}])
def test_ddp_rejects_a_mesh_and_names_the_other_layer(option: Any) -> None:
    with pytest.raises(ConfigError, match="DDPTrainer copies the whole model into every process; FSDPTrainer divides"):
        DDPTrainer(trainer(), **option)


def test_explain_shows_the_coordinates_of_the_mesh() -> None:
    sharded = FSDPTrainer(trainer(), mesh={"shard": -1, "tensor": 2})
    assert "├── mesh: replicate 1 × shard (the rest) × tensor 2\n" in str(
        AMPTrainer(sharded, precision="bf16").explain()
    )
    assert "mesh" not in str(trainer().explain())


def test_a_memory_plan_divides_the_tensors_of_a_mesh() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    plan = {"0": "colwise", "2": "rowwise"}
    core = Trainer(model, "cpu", batch_size=16, criterion=nn.MSELoss(), verbose=False)
    sharded = FSDPTrainer(core, mesh={"tensor": 2}, parallelize=plan, num_processes=2)
    found = plan_memory(sharded, (torch.zeros(64, 256), torch.zeros(64, 256)))
    # Each process has half of both matrices and of the first bias, and the whole second bias.
    assert found.kinds["parameters"] == 4 * (256 * 1024 + 1024 // 2 + 256)
    # The processes add the outputs of the second layer, of 16 samples, and a few counts.
    assert 0 <= found.collectives["all_reduce"] - 4 * 16 * 256 < 100
    assert type(model[0].weight) is nn.Parameter
