"""Activation checkpointing: equal bits with less memory, and a model that is the same after the run."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problem import Problem, assert_same_weights
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail import Batches, Epochs
from dovetail.callbacks import EMA, Callback
from dovetail.errors import ConfigError
from dovetail.trainers import ActivationCheckpointTrainer, AMPTrainer, DDPTrainer, PrivateTrainer, Trainer
from dovetail.trainers.capabilities import ActivationCheckpointing


class Block(nn.Module):
    """Every kind of state that a second computation could spoil: dropout, batch norm, power iterations."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.norm = nn.BatchNorm1d(24)
        self.second = spectral_norm(nn.Linear(24, 12))
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("mask", torch.ones(12))
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        outputs: Tensor = x + scale * self.mask * self.dropout(self.second(torch.tanh(self.norm(self.first(x)))))
        return outputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        outputs: Tensor = self.head(x)
        return outputs


def build(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        Net(), "cpu", optimizer=partial(torch.optim.Adam, lr=0.01), batch_size=8, seed=1, verbose=False, **settings
    )


def train(trainer: Any, problem: Problem) -> nn.Module:
    trainer.fit((problem.x, problem.y), (problem.x, problem.y), max_length=Batches(6))
    model: nn.Module = trainer.model
    return model


OUTER: dict[str, Callable[[Any], Any]] = {
    "plain": lambda trainer: trainer,
    "amp": partial(AMPTrainer, precision="bf16"),
    "ddp": DDPTrainer,
}


@pytest.mark.parametrize(
    ("outer", "choice", "settings"),
    [
        ("plain", {}, {}),
        ("amp", {}, {"accumulation_steps": 3}),
        ("ddp", {}, {"accumulation_steps": 3}),
        ("plain", {"every": 2}, {"gradient_clip": 0.1}),
        ("plain", {"keep": "matmul"}, {}),
        ("amp", {"keep": "matmul"}, {}),
        ("plain", {"blocks": ["blocks.1", "head"]}, {}),
        ("plain", {"blocks": [nn.Sequential, Block], "keep": [torch.ops.aten.tanh.default]}, {}),
    ],
)
def test_recomputed_blocks_give_the_bits_of_stored_activations(
    problem: Problem, outer: str, choice: dict[str, Any], settings: dict[str, Any]
) -> None:
    stored = train(OUTER[outer](build(**settings)), problem)
    recomputed = OUTER[outer](ActivationCheckpointTrainer(build(**settings), **choice))
    assert_same_weights(train(recomputed, problem), stored)


class Drops(nn.Module):
    """Draws with the generators of Python and NumPy: noise, and LayerDrop. With or without buffers."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.4:
            return x
        outputs: Tensor = x + torch.tanh(self.norm(self.linear(x)) * np.random.normal())
        return outputs


@pytest.mark.parametrize("norm", [False, True])
def test_python_and_numpy_draw_the_same_numbers_in_the_second_computation(problem: Problem, norm: bool) -> None:
    def trained(wrap: Callable[[Any], Any]) -> tuple[nn.Module, float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), *(Drops(norm) for _ in range(4)), nn.Linear(12, 3))
        settings: dict[str, Any] = {
            "optim_function": "SGD",
            "learning_rate": 0.1,
            "batch_size": 8,
            "seed": 1,
            "verbose": False,
        }
        return train(wrap(Trainer(model, "cpu", **settings)), problem), random.random(), np.random.normal()

    (stored, *numbers), (recomputed, *others) = trained(lambda it: it), trained(ActivationCheckpointTrainer)
    assert_same_weights(recomputed, stored)
    # A run without the layer draws the same numbers later.
    assert others == numbers


def test_decorator_and_add_on_give_equal_bits(problem: Problem) -> None:
    decorated = ActivationCheckpointTrainer(build(), every=2)
    torch.manual_seed(0)
    added = Trainer.add_on(ActivationCheckpointing)(
        Net(), "cpu", optimizer=partial(torch.optim.Adam, lr=0.01), batch_size=8, seed=1, verbose=False, every=2
    )
    assert_same_weights(train(decorated, problem), train(added, problem))
    assert decorated.recomputed_blocks == added.recomputed_blocks == ["blocks.0", "blocks.2"]


@pytest.mark.parametrize(
    ("choice", "calls"), [({}, [2, 2, 2, 2]), ({"every": 3}, [2, 1, 1, 2]), ({"blocks": ["blocks.[12]"]}, [1, 2, 2, 1])]
)
def test_only_the_chosen_blocks_are_computed_twice(problem: Problem, choice: Any, calls: list[int]) -> None:
    trainer = ActivationCheckpointTrainer(build(), **choice)
    trainer.fit((problem.x, problem.y), max_length=Batches(1))
    model: Any = trainer.model
    assert [block.calls for block in model.blocks] == calls


class Storage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of new tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, Tensor):
                storage = output.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return outputs

    def free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def test_fewer_stored_activations_lower_the_peak_of_memory() -> None:
    x, y = torch.randn(2048, 6), torch.zeros(2048, dtype=torch.long)

    def peak(trainer: Any) -> int:
        storage = Storage()
        with storage:
            trainer.fit([(x, y)], max_length=Epochs(1))
        return storage.peak

    plain = peak(build())
    selective = peak(ActivationCheckpointTrainer(build(), keep="matmul"))
    half = peak(ActivationCheckpointTrainer(build(), every=2))
    whole = peak(ActivationCheckpointTrainer(build()))
    assert whole < half < plain
    assert whole < selective < plain
    assert whole < 0.6 * plain


def test_the_model_is_the_same_before_and_after_a_run(problem: Problem) -> None:
    keys: list[list[str]] = []

    class Look(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            keys.append(list(context.model.state_dict()))

    trainer = ActivationCheckpointTrainer(build(callbacks=[Look()]))
    before = list(trainer.model.state_dict())
    trainer.fit((problem.x, problem.y), max_length=Batches(2))
    model: Any = trainer.model
    assert keys == [before] * 2
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_model_is_restored_after_an_error(problem: Problem) -> None:
    class Fail(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            raise RuntimeError("here")

    trainer = ActivationCheckpointTrainer(build(callbacks=[Fail()]))
    trainer.model.blocks[1].forward = own = trainer.model.blocks[1].forward
    with pytest.raises(RuntimeError, match="here"):
        trainer.fit((problem.x, problem.y), max_length=Batches(2))
    model: Any = trainer.model
    assert [block for block in model.blocks if "forward" in vars(block)] == [model.blocks[1]]
    assert model.blocks[1].forward is own


class Cached(Net):
    """A part of a model, with a configuration of its own, as the decoder of an encoder-decoder model has."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.seen = SimpleNamespace(use_cache=True), set[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(self.config.use_cache)
        return super().forward(x)


def test_the_caches_of_all_parts_are_off_during_a_run(problem: Problem) -> None:
    parts = Cached(), Cached()
    # Two parts may share a configuration, and a cache that is off stays off.
    parts[1].config, off = parts[0].config, SimpleNamespace(use_cache=False)
    vars(parts[1].head)["config"] = off
    model = nn.Sequential(parts[0], nn.Linear(3, 6), parts[1])
    train(ActivationCheckpointTrainer(Trainer(model, "cpu", batch_size=8, verbose=False), blocks=[Block]), problem)
    assert parts[0].seen == parts[1].seen == {False}
    assert parts[0].config.use_cache
    assert not off.use_cache


def test_averaged_weights_do_not_change_with_recomputed_blocks(problem: Problem) -> None:
    averages = []
    for wrap in (lambda trainer: trainer, ActivationCheckpointTrainer):
        ema = EMA(0.9)
        train(wrap(build(callbacks=[ema])), problem)
        averages.append(ema.state_dict())
    torch.testing.assert_close(averages[0], averages[1], rtol=0, atol=0)


def test_a_resumed_run_may_switch_activation_checkpointing_on(problem: Problem, tmp_path: Any) -> None:
    whole = build()
    whole.fit((problem.x, problem.y), max_length=Batches(9))
    first, second = build(), ActivationCheckpointTrainer(build())
    first.fit((problem.x, problem.y), max_length=Batches(7))
    first.save_checkpoint(tmp_path / "middle")
    second.fit((problem.x, problem.y), max_length=Batches(9), resume=tmp_path / "middle")
    assert_same_weights(second.model, whole.model)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"every": 0}, "every: expected a whole number that is at least 1, got 0"),
        ({"blocks": "blocks"}, "blocks: expected classes of modules, names of modules, a function"),
        ({"blocks": ["layers.*"]}, r"blocks: Net has no module 'layers.\*'; it has stem, blocks, blocks.0"),
        ({"blocks": [nn.Conv2d]}, "blocks: Net has no module of class Conv2d"),
        ({"blocks": lambda module: False}, "returns True for no module of Net"),
        ({"keep": "mm"}, "keep: expected 'matmul' or a list of operators such as torch.ops.aten.mm.default, got 'mm'"),
        ({"keep": [torch.mm]}, "keep: expected 'matmul' or a list of operators"),
    ],
)
def test_a_wrong_choice_of_blocks_is_one_clear_error(problem: Problem, choice: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ActivationCheckpointTrainer(build(), **choice).fit((problem.x, problem.y), max_length=Batches(1))


def test_a_model_without_repeated_blocks_needs_a_choice(problem: Problem) -> None:
    trainer = ActivationCheckpointTrainer(Trainer(problem.model(), "cpu", verbose=False))
    with pytest.raises(ConfigError, match="Sequential has no repeated blocks in a Sequential or ModuleList; give"):
        trainer.fit((problem.x, problem.y), max_length=Batches(1))


def test_private_training_rejects_recomputed_blocks() -> None:
    with pytest.raises(ConfigError, match="would count the gradients of its samples twice"):
        PrivateTrainer(ActivationCheckpointTrainer(build()))
