"""Plans of tensor parallelism: which parameters they divide, and what is said about plans that cannot work.

One process of a fake group of two, in which nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dovetail.errors import ConfigError
from dovetail.trainers.capabilities.tensor_parallel import LocalWeights, local_forward, parallelize


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


PLAN = {"blocks.*.0": "colwise", "blocks.*.1": "rowwise"}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    parameters: Any = model.named_parameters()
    return {name: tuple(it.to_local().shape) for name, it in parameters}


def test_a_plan_divides_the_named_modules_and_replicates_the_others(mesh: DeviceMesh) -> None:
    model = Net()
    expected = {name: it.detach().clone() for name, it in model.named_parameters()}
    replicas = parallelize(model, mesh, PLAN)
    own = shapes(model)
    assert own["blocks.1.0.weight"] == (4, 4)
    assert own["blocks.1.0.bias"] == (4,)
    assert own["blocks.1.1.weight"] == (4, 4)
    assert own["blocks.1.1.bias"] == (4,)
    assert own["norm.weight"] == (4,)
    assert own["embed.weight"] == (6, 4)
    # The second process has the second half.
    weights: Any = dict(model.named_parameters())
    assert torch.equal(weights["blocks.0.0.weight"].to_local(), expected["blocks.0.0.weight"][4:])
    assert torch.equal(weights["blocks.0.1.weight"].to_local(), expected["blocks.0.1.weight"][:, 4:])
    assert {(type(module), name) for module, name in replicas} == {
        (nn.Embedding, "weight"),
        (nn.LayerNorm, "weight"),
        (nn.LayerNorm, "bias"),
        (nn.Linear, "weight"),
    }
    assert model.head.weight is model.embed.weight


def test_two_modules_that_share_a_parameter_still_share_it(mesh: DeviceMesh) -> None:
    model = Net()
    parallelize(model, mesh, {"embed": "embedding_rowwise", "head": "colwise_gather_output"})
    assert model.head.weight is model.embed.weight
    assert shapes(model)["embed.weight"] == (3, 4)


def test_a_module_computes_with_plain_tensors_and_gets_its_parameters_back(mesh: DeviceMesh) -> None:
    model, inputs = Net(), torch.randn(3, 4)
    expected = model.norm(inputs)
    replicas = parallelize(model, mesh, PLAN)
    parameter = model.norm.weight
    LocalWeights([place for place in replicas if place[0] is model.norm]).install(model.norm)
    for outputs in (model.norm(inputs), local_forward(model.norm, model.norm.forward)(inputs)):
        assert type(outputs) is Tensor
        assert torch.equal(outputs, expected)
        torch.autograd.backward(outputs.sum())
        assert model.norm.weight is parameter
    gradient: Any = parameter.grad
    assert gradient.placements[0].is_replicate()
    with pytest.raises(RuntimeError):
        model.norm(torch.randn(3, 5))
    assert model.norm.weight is parameter


def test_a_function_may_divide_a_model(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = Net()
    parallelize(model, mesh, lambda it, place: parallelize_module(it, place, {"blocks.0.0": ColwiseParallel()}))
    assert shapes(model)["blocks.0.0.weight"] == (4, 4)


def _another(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "a Net has no plan for tensor parallelism; give parallelize="),
        ("auto", "a Net has no plan for tensor parallelism; give parallelize="),
        ({"blocks.*.7": "colwise"}, r"no module of the model has the name 'blocks.\*.7'"),
        (
            {"blocks.0": "moe_tp_experts"},
            "the style of 'blocks.0': expected a ParallelStyle of torch, or one of colwise,",
        ),
        ({"norm": "replicated_with_grad_allreduce"}, "the plan divides no parameter of the model"),
        (
            {"head": "colwise"},
            "Embedding.weight and Linear.weight are one parameter, which the plan divides in two ways",
        ),
        (_another, "the function returned another model, a Linear; change the given one"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_rejected(mesh: DeviceMesh, plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"parallelize: {message}"):
        parallelize(Net(), mesh, plan)


def test_a_length_that_the_processes_cannot_share_is_rejected(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 2))
    with pytest.raises(
        ConfigError, match=r"dimension 0 of '0.weight' has the length 7, which 2 processes cannot share"
    ):
        parallelize(model, mesh, {"0": "colwise"})
