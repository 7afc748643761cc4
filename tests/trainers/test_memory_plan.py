"""Memory plans against the bytes that torch's allocator really had, and against known answers."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import Problem, assert_same_weights
from torch import Tensor, nn

from dovetail import Batches
from dovetail.callbacks import Callback
from dovetail.errors import ConfigError
from dovetail.trainers import DDPTrainer, FSDPTrainer, PowerSGD, Trainer
from dovetail.trainers.memory_plan import plan_memory, plan_script


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def build() -> tuple[Trainer, list[Any]]:
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    data = [(torch.randn(32, 100), torch.zeros(32, dtype=torch.long)) for _ in range(2)]
    return Trainer(mlp(), "cpu", optimizer=optimizer, seed=0, verbose=False), data


def bytes_of(values: Any) -> int:
    return sum(it.numel() * it.element_size() for it in values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "MLP",
        "MLP, accumulation",
        "CNN",
        "transformer",
        "GPT-2",
        "activation checkpointing",
        pytest.param("bfloat16", marks=pytest.mark.torture),
        pytest.param("float16", marks=pytest.mark.torture),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(loss_type|deprecated).*")
def test_the_planned_peak_is_within_five_percent_of_the_allocated_one(
    memory_bench: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "GPT-2":
        pytest.importorskip("transformers")
    # The first profiler of a process decides whether all of them print a line at their start.
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    plan = memory_bench.plan(name, "one process")
    assert plan.peak == pytest.approx(memory_bench.measure(name, "one process")["peak"], rel=0.05)


def test_the_kinds_of_an_mlp_have_the_known_sizes() -> None:
    plan = plan_memory(*build())
    parameters = 4 * sum(it.numel() for it in mlp().parameters())
    assert plan.kinds["parameters"] == plan.kinds["gradients"] == parameters
    # Two moments, and a count of steps for each of the six tensors.
    assert plan.kinds["optimizer"] == 2 * parameters + 4 * 6
    assert plan.kinds["batch"] == 32 * 100 * 4 + 32 * 8
    assert plan.peak == sum(plan.kinds.values())


@pytest.mark.parametrize("layer", [None, FSDPTrainer])
def test_a_plan_changes_nothing(problem: Problem, layer: Any) -> None:
    steps = []

    class Note(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            steps.append(context.progress.batches)

    def build() -> Any:
        optimizer = partial(torch.optim.Adam, lr=0.01)
        settings: dict[str, Any] = {"batch_size": 8, "seed": 1, "verbose": False, "callbacks": [Note()]}
        trainer = Trainer(problem.model(dropout=0.3), "cpu", optimizer=optimizer, **settings)
        return trainer if layer is None else layer(trainer)

    planned, plain = build(), build()
    for trainer in (planned, plain):
        trainer.fit((problem.x, problem.y), max_length=Batches(2))
    gradients = [copy.deepcopy(it.grad) for it in planned.model.parameters()]
    random_numbers, show_error = torch.get_rng_state(), sys.excepthook
    attributes = [(type(it), vars(it).keys()) for it in planned.model.modules()]
    plan_memory(planned, num_processes=None if layer is None else 2)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    torch.testing.assert_close([it.grad for it in planned.model.parameters()], gradients)
    assert [(type(it), vars(it).keys()) for it in planned.model.modules()] == attributes
    assert (sys.excepthook, dist.is_initialized()) == (show_error, False)
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
    trainer, data = build()
    size = bytes_of(trainer.model.parameters())
    parallel = plan_memory(DDPTrainer(trainer), data, num_processes=8)
    # Besides the gradients: a flag for each of 6 parameters, 8 counts and the weight of the process.
    assert parallel.collectives == {"all_reduce": size + 4 * (6 + 8 + 1)}
    assert parallel.kinds["buckets"] == size + 4 * (6 + 8 + 1)

    sharded = plan_memory(FSDPTrainer(build()[0], num_processes=4), data)
    assert sharded.num_processes == 4
    part = sum(4 * -(-len(it) // 4) * (it.numel() // len(it)) for it in trainer.model.parameters())
    assert sharded.kinds["parameters"] == part
    # A block is gathered twice. The 6 counts and flags are in float64.
    counts = {"all_reduce": 8 * 6}
    assert sharded.collectives == {"all_gather": 2 * 4 * part, "reduce_scatter": 4 * part, **counts}
    kept = plan_memory(FSDPTrainer(build()[0], reshard_after_forward=False), data, num_processes=4)
    assert kept.collectives == {"all_gather": 4 * part, "reduce_scatter": 4 * part, **counts}


def test_copies_and_parts_of_a_mesh_have_the_known_sizes() -> None:
    trainer, data = build()
    hybrid = plan_memory(FSDPTrainer(trainer, mesh={"replicate": 16, "shard": 2}), data, num_processes=32)
    size = bytes_of(trainer.model.parameters())
    assert hybrid.kinds["parameters"] == size // 2
    # The sums of a part are summed again over the copies.
    assert hybrid.collectives == {"all_gather": 2 * size, "reduce_scatter": size, "all_reduce": size // 2 + 8 * 6}


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_the_state_of_convolutions_in_channels_last_is_planned(place: str) -> None:
    plans = []
    for memory_format, where in ((None, "cpu"), ("channels_last", place)):
        with torch.device(where):
            model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(256, 4))
        settings: dict[str, Any] = {"memory_format": memory_format, "verbose": False}
        trainer = Trainer(model, "cpu", optimizer=partial(torch.optim.Adam, lr=0.1), **settings)
        plans.append(plan_memory(trainer, [(torch.zeros(8, 3, 6, 6), torch.zeros(8, dtype=torch.long))]))
        assert all(it.device.type == where and it.is_contiguous() for it in model.parameters())
        assert trainer.options.memory_format == memory_format
    usual, converted = plans
    # Two moments, and a count of steps for each of the six tensors.
    assert converted.kinds["optimizer"] == usual.kinds["optimizer"] == 2 * usual.kinds["parameters"] + 4 * 6
    # The batch is copied to the other format.
    assert converted.peak == usual.peak + 8 * 3 * 6 * 6 * 4


@pytest.mark.parametrize("layer", [DDPTrainer, FSDPTrainer])
def test_a_model_without_data_is_planned_with_synced_batch_norms(layer: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(100, 256), nn.BatchNorm1d(256), nn.Linear(256, 10))

    data = build()[1]
    plans = []
    for place, syncs in (("cpu", False), ("cpu", True), ("meta", True)):
        with torch.device(place):
            trainer = Trainer(model(), "cpu", seed=0, verbose=False)
        plans.append(plan_memory(layer(trainer, sync_batchnorm=syncs), data, num_processes=2))
        assert all(it.device.type == place for it in trainer.model.parameters())
    usual, synced, empty = plans
    assert empty.collectives == synced.collectives
    assert empty.peak == pytest.approx(synced.peak, rel=1e-3)
    # Forward: a row of two sums per channel and a count for each process. Backward: two sums per channel.
    more = synced.collectives["all_reduce"] - usual.collectives["all_reduce"]
    assert more == 4 * (2 * (2 * 256 + 1) + 2 * 256)


def test_offloaded_shards_and_copies_of_messages_are_counted_on_request() -> None:
    data = build()[1]
    offloaded = plan_memory(FSDPTrainer(build()[0], cpu_offload=True), data, num_processes=4)
    assert not offloaded.kinds.keys() & {"parameters", "gradients", "optimizer"}
    assert "optimizer state are in the memory of the host" in offloaded.notes[0]
    sharded = plan_memory(FSDPTrainer(build()[0]), data, num_processes=2)
    copying = plan_memory(FSDPTrainer(build()[0]), data, num_processes=2, backend="gloo")
    # Gloo copies the gradients of the largest block: a matrix of 256 rows, and its bias.
    assert copying.kinds["messages"] == 4 * (256 * 256 + 256)
    assert "messages" not in sharded.kinds
    assert copying.peak > sharded.peak


def labels_of(outputs: Tensor, targets: Tensor) -> Tensor:
    # Labels of two dimensions, like labels of tokens.
    return targets[:, None].expand(outputs.shape[:2])


MASKS: dict[str, Any] = {
    "index": lambda it, labels: (it[labels != -100], labels[labels != -100]),
    "nonzero": lambda it, labels: (it[torch.where(labels == 0)], labels[torch.where(labels == 0)]),
    "masked_select": lambda it, labels: (
        it.masked_select((labels == 0)[..., None]).view(-1, it.shape[-1]),
        labels.masked_select(labels == 0),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_planned_as_if_it_kept_everything(name: str) -> None:
    def train_step(trainer: Any, batch: Any, masks: bool) -> Tensor:
        outputs = trainer.model(batch[0]).view(32, 5, 2)
        kept: Any = (outputs, labels_of(outputs, batch[1]))
        kept = MASKS[name](*kept) if masks else (kept[0].reshape(-1, 2), kept[1].reshape(-1))
        return nn.functional.cross_entropy(*kept)

    data = build()[1]
    plans = [
        plan_memory(Trainer(mlp(), "cpu", train_step=partial(train_step, masks=masks), verbose=False), data)
        for masks in (False, True)
    ]
    # The kept outputs are copies, and smaller than the gradients at the peak.
    assert plans[0].peak <= plans[1].peak < 1.1 * plans[0].peak
    assert plans[0].notes == ()
    assert plans[1].notes
    assert all("of test_memory_plan.py: a result whose length" in it for it in plans[1].notes)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.recurrent(x)[0][:, -1])
        return outputs


def test_the_activations_of_all_steps_of_an_lstm_are_planned() -> None:
    batch, before = (torch.zeros(64, 50, 4), torch.zeros(64, dtype=torch.long)), torch.backends.mkldnn.enabled
    plan = plan_memory(Trainer(Recurrent(), "cpu", verbose=False), [batch])
    # Each of 50 steps stores at least four gates, a cell and an output, of 8 numbers for each of 64 samples.
    assert plan.kinds["activations"] > 50 * 6 * 8 * 64 * 4
    assert torch.backends.mkldnn.enabled == before


def test_a_length_that_has_no_bound_is_an_error_with_its_line() -> None:
    def train_step(trainer: Any, batch: Any) -> Tensor:
        return trainer.model(batch[0]).sum() * len(batch[1].unique())  # type: ignore[no-any-return]  # a tensor

    trainer = Trainer(mlp(), "cpu", train_step=train_step, verbose=False)
    with pytest.raises(ConfigError, match=r"plan: line \d+ of test_memory_plan.py: the length of the result of aten"):
        plan_memory(trainer, build()[1])


@pytest.mark.parametrize(
    ("compression", "name"), [("bf16", None), (PowerSGD(rank=2), "after the warm-up of PowerSGD(rank=2, warm_up=1000)")]
)
def test_compressed_gradients_are_planned_as_buckets(compression: Any, name: str | None) -> None:
    trainer, data = build()
    plan = plan_memory(DDPTrainer(trainer, compression=compression), data, num_processes=2)
    number = sum(it.numel() for it in mlp().parameters())
    # Six flags of gradients, eight counts and the weight.
    gradients = 4 * (number + 15)
    if name is None:
        assert plan.collectives == {"all_reduce": 2 * number + 4 * 15}
        assert plan.kinds["buckets"] == gradients + 2 * number
        assert plan.notes == ()
    else:
        # Weights are sent as thin matrices, and each has an error that stays in memory.
        assert plan.collectives["all_reduce"] < gradients / 10
        assert plan.kinds["buckets"] > 1.95 * gradients
        assert name in plan.notes[0]


def test_a_process_of_a_group_cannot_plan_another_group() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    trainer, data = build()
    show_error = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ConfigError, match="this process is in a process group already"):
            plan_memory(DDPTrainer(trainer), data, num_processes=8)
    finally:
        dist.destroy_process_group()
        sys.excepthook = show_error


def test_a_process_of_a_launcher_plans_the_given_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer, data = build()
    with pytest.raises(ConfigError, match="a launcher started this process for a group; give num_processes, or --gpus"):
        plan_memory(DDPTrainer(trainer), data)
    assert plan_memory(DDPTrainer(trainer), data, num_processes=8).num_processes == 8
    # Without such a layer the process does not join the group.
    assert plan_memory(trainer, data).num_processes == 1


def test_devices_without_a_parallel_layer_are_reported() -> None:
    plan = plan_memory(*build(), num_processes=8)
    assert (plan.num_processes, plan.collectives) == (1, {})
    assert plan.notes == ("the trainer has no DDPTrainer or FSDPTrainer: it uses 1 of 8 devices",)


def test_a_script_without_fit_is_one_clear_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="ended without a call of fit, so there is nothing to plan"):
        plan_script(script)


class Tied(nn.Module):
    """A model whose two matrices are one parameter, and which has no `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.first = nn.Linear(256, 256, bias=False)
        self.last = nn.Linear(256, 256, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.last(self.first(x * self.scale))
        return scaled


@pytest.mark.parametrize("layer", [None, FSDPTrainer])
def test_tied_weights_without_data_have_the_plan_of_weights_with_data(layer: Any) -> None:
    data = torch.zeros(8, 256), torch.zeros(8, 256)
    plans = []
    for place in ("cpu", "meta"):
        with torch.device(place):
            trainer = Trainer(Tied(), "cpu", criterion=nn.MSELoss(), seed=0, verbose=False)
        plans.append(plan_memory(trainer if layer is None else layer(trainer), data, num_processes=2))
        assert trainer.model.first.weight is trainer.model.last.weight
    with_data, empty = plans
    assert dict(empty.kinds) == dict(with_data.kinds)
    assert empty.collectives == with_data.collectives
    if layer is None:
        assert empty.kinds["parameters"] == 4 * (256 * 256 + 256)
