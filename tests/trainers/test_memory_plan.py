"""Memory plans against the bytes that torch's allocator really had, and against known answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from dovetail import Batches, Epochs
from dovetail.callbacks import Callback
from dovetail.errors import ConfigError
from dovetail.trainers import ActivationCheckpointTrainer, AMPTrainer, DDPTrainer, FSDPTrainer, Trainer
from dovetail.trainers.memory_plan import plan_memory, plan_script

Case = Callable[[], tuple[Any, list[Any]]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        outputs: Tensor = x + self.mlp(x)
        return outputs


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(x).mean(1)
        return outputs


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def case(model: Callable[[], nn.Module], inputs: Callable[[], Any], wrap: Any = None, **settings: Any) -> Case:
    def build() -> tuple[Any, list[Any]]:
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        trainer = Trainer(model(), "cpu", optimizer=optimizer, seed=0, verbose=False, **settings)
        return trainer if wrap is None else wrap(trainer), [inputs() for _ in range(2)]

    return build


def labelled(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.zeros(shape[0], dtype=torch.long)


def tokens(named: bool = False) -> Any:
    ids = torch.randint(0, 50, (32, 32))
    return {"input_ids": ids, "labels": ids.clone()} if named else (ids, torch.zeros(32, dtype=torch.long))


CASES: dict[str, Case] = {
    "mlp": case(mlp, lambda: labelled(32, 100)),
    "mlp, large batch, accumulation": case(mlp, lambda: labelled(2000, 100), accumulation_steps=2, gradient_clip=1.0),
    "cnn": case(cnn, lambda: labelled(16, 3, 16, 16)),
    "transformer": case(Transformer, tokens),
    "gpt-2": case(gpt2, lambda: tokens(named=True)),
    "activation checkpointing": case(Transformer, tokens, ActivationCheckpointTrainer),
    "bfloat16": case(Transformer, tokens, partial(AMPTrainer, precision="bf16")),
    "float16": case(mlp, lambda: labelled(2000, 100), partial(AMPTrainer, precision="fp16", init_scale=1.0)),
}


def bytes_of(values: Any) -> int:
    return sum(it.numel() * it.element_size() for it in tree_leaves(values) if isinstance(it, Tensor))


def allocated_peak(build: Case, batch: int) -> int:
    """The most bytes that the allocator of torch had given out at once, in a real run of two windows."""
    with pytest.MonkeyPatch.context() as patch:
        # The first profiler of a process decides whether all of them print a line at their start.
        patch.setenv("KINETO_LOG_LEVEL", "6")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            trainer, data = build()
            trainer.fit(data, max_length=Epochs(2))
    kineto = recorded.profiler.kineto_results
    events = sorted((it for it in kineto.events() if it.name() == "[memory]"), key=lambda it: it.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    # The list holds all batches, and a loader would hold one.
    return peak - (bytes_of(data) - batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.torture] if "float16" in name else []) for name in CASES]
)
@pytest.mark.filterwarnings("ignore:.*(loss_type|deprecated).*")
def test_the_planned_peak_is_within_five_percent_of_the_allocated_one(name: str) -> None:
    plan = plan_memory(*CASES[name]())
    measured = allocated_peak(CASES[name], plan.kinds["batch"])
    assert plan.peak == pytest.approx(measured, rel=0.05)


def test_the_kinds_of_an_mlp_have_the_known_sizes() -> None:
    plan = plan_memory(*CASES["mlp"]())
    parameters = 4 * sum(it.numel() for it in mlp().parameters())
    assert plan.kinds["parameters"] == plan.kinds["gradients"] == parameters
    # Two moments, and a count of steps for each of the six tensors.
    assert plan.kinds["optimizer"] == 2 * parameters + 4 * 6
    assert plan.kinds["batch"] == 32 * 100 * 4 + 32 * 8
    assert plan.peak == sum(plan.kinds.values())


def test_a_plan_changes_nothing(problem: Problem) -> None:
    steps = []

    class Note(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            steps.append(context.progress.batches)

    def build() -> Trainer:
        optimizer = partial(torch.optim.Adam, lr=0.01)
        settings: dict[str, Any] = {"batch_size": 8, "seed": 1, "verbose": False, "callbacks": [Note()]}
        return Trainer(problem.model(dropout=0.3), "cpu", optimizer=optimizer, **settings)

    planned, plain = build(), build()
    for trainer in (planned, plain):
        trainer.fit((problem.x, problem.y), max_length=Batches(2))
    gradients = [copy.deepcopy(it.grad) for it in planned.model.parameters()]
    random_numbers = torch.get_rng_state()
    plan_memory(planned)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    torch.testing.assert_close([it.grad for it in planned.model.parameters()], gradients)
    for trainer in (planned, plain):
        torch.manual_seed(3)
        trainer.fit((problem.x, problem.y), max_length=Batches(3))
    assert_same_weights(planned.model, plain.model)
    assert planned.context.progress == plain.context.progress
    assert steps == [1, 2, 1, 2, 3, 3]


def test_a_model_without_data_can_be_planned() -> None:
    with torch.device("meta"):
        # 17 GB of parameters, which no process here could hold.
        model = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False) for _ in range(4)))
    data = torch.zeros(8, 2**15), torch.zeros(8, 2**15)
    trainer = Trainer(model, "cpu", criterion=nn.MSELoss(), optimizer=partial(torch.optim.Adam, lr=0.1), verbose=False)
    plan = plan_memory(trainer, data, memory=10**9)
    assert plan.kinds["parameters"] == plan.kinds["gradients"] == 4 * 4 * 2**30
    assert plan.kinds["optimizer"] == 2 * 4 * 4 * 2**30 + 4 * 4
    assert plan.fits is False
    assert all(it.is_meta for it in model.parameters())


def test_processes_exchange_the_bytes_of_gradients_or_of_blocks() -> None:
    trainer, data = CASES["mlp"]()
    size = bytes_of(list(trainer.model.parameters()))
    parallel = plan_memory(DDPTrainer(trainer), data, num_processes=8)
    assert parallel.collectives == {"all_reduce": size}
    # The copies of the gradients that are sent.
    assert parallel.kinds["buckets"] == size

    sharded = plan_memory(FSDPTrainer(CASES["mlp"]()[0], num_processes=4), data)
    assert sharded.num_processes == 4
    assert sharded.collectives == {"all_gather": 2 * size, "reduce_scatter": size}
    assert sharded.kinds["parameters"] == sum(
        4 * -(-len(it) // 4) * (it.numel() // len(it)) for it in trainer.model.parameters()
    )
    offloaded = plan_memory(FSDPTrainer(CASES["mlp"]()[0], cpu_offload=True), data, num_processes=4)
    assert not offloaded.kinds.keys() & {"parameters", "gradients", "optimizer"}
    assert "optimizer state are in the memory of the host" in offloaded.notes[0]
    kept = plan_memory(FSDPTrainer(CASES["mlp"]()[0], reshard_after_forward=False), data, num_processes=4)
    assert kept.collectives["all_gather"] == size


def test_devices_without_a_parallel_layer_are_reported() -> None:
    plan = plan_memory(*CASES["mlp"](), num_processes=8)
    assert (plan.num_processes, plan.collectives) == (1, {})
    assert plan.notes == ("the trainer has no DDPTrainer or FSDPTrainer: it uses 1 of 8 devices",)


def test_a_script_without_fit_is_one_clear_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="ended without a call of fit, so there is nothing to plan"):
        plan_script(script)
