"""What one process does in `test_fsdp.py`: `python sharded_ranks.py FOLDER`, with torchrun's variables set.

Every case is a function that trains and returns plain values; the results of each rank are written to
`FOLDER/<rank>.json`. Without a group the plain trainer runs the same cases.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail import Batches, Epochs
from dovetail.callbacks import EMA, Callback, GradientClipping
from dovetail.distributed import PeerError
from dovetail.errors import CheckpointError, ConfigError
from dovetail.trainers import ActivationCheckpointTrainer, AMPTrainer, FSDPTrainer, Trainer
from dovetail.trainers.capabilities import ShardedDataParallel

CASES: dict[str, Callable[..., Any]] = {}
GLOBAL_BATCH = 12


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def layer(trainer: Trainer) -> Any:
    """The trainer of a group, or the plain one where there is none."""
    return FSDPTrainer(trainer) if world() > 1 else trainer


def data(size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, (inputs.sum(dim=1) > 0).long()


class Net(nn.Module):
    """Blocks of several sizes, a parameter of the model itself, one that is a single number, and a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.head = nn.Linear(7, 2)
        # First in the model: torch chooses its operation for a list of gradients by the first one.
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(self.frozen(inputs))) * self.scale + self.shift
        return outputs


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return Net().to(dtype)


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def weights(module: nn.Module) -> list[float]:
    return torch.cat([whole(parameter).double().flatten() for parameter in module.parameters()]).tolist()


SETTINGS: dict[str, Any] = {
    "optim_function": "SGD",
    "learning_rate": 0.3,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "seed": 3,
    "drop_last": False,
    "verbose": False,
}


def trained(module: nn.Module, source: Any, epochs: int = 1, wrap: Callable[..., Any] = layer, **settings: Any) -> Any:
    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // world(), **settings}
    trainer = wrap(Trainer(module, "cpu", **settings))
    history = trainer.fit(source, data(17, source[0].dtype), max_length=Epochs(epochs))
    rows = [history.get_latest_metric(name) for name in ("train_loss", "valid_loss", "valid_accuracy")]
    return {"weights": weights(module), "metrics": rows, "progress": trainer.context.progress.state_dict()}


# ------------------------------------------------------------------ equalities with one process


@case
def even_batches(folder: Path) -> Any:
    return trained(model(), data(48))


@case
def recomputed_blocks(folder: Path) -> Any:
    """The weights with stored and with recomputed activations, with dropout, in either order of the layers."""

    def train(wrap: Callable[..., Any]) -> list[float]:
        torch.manual_seed(7)
        blocks = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.3)) for _ in range(3)]
        module = nn.Sequential(*blocks, nn.Linear(5, 2)).double()
        weights: list[float] = trained(module, data(48), wrap=wrap, accumulation_steps=2)["weights"]
        return weights

    inside, outside = lambda it: layer(recompute(it)), lambda it: recompute(layer(it))
    return {"stored": train(layer), "recomputed": [train(inside), train(outside)]}


def recompute(trainer: Any) -> Any:
    return ActivationCheckpointTrainer(trainer, keep="matmul")


@case
def uneven_batches(folder: Path) -> Any:
    return trained(model(), data(53), epochs=2)


@case
def clipping(folder: Path) -> Any:
    return trained(model(), data(53), gradient_clip=0.05)


@case
def accumulation(folder: Path) -> Any:
    return trained(model(), data(60), accumulation_steps=2, gradient_clip=0.1)


@case
def accumulation_that_some_finish_early(folder: Path) -> Any:
    return trained(model(), data(42), accumulation_steps=2)


def synced(trainer: Trainer) -> Any:
    return FSDPTrainer(trainer, sync_batchnorm=True) if world() > 1 else trainer


@case
def synced_norms(folder: Path) -> Any:
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    found = trained(module, data(53), wrap=synced, accumulation_steps=2)
    statistics = [number for buffer in module.buffers() for number in buffer.double().flatten().tolist()]
    return {**found, "weights": found["weights"] + statistics}


@case
def less_data_than_processes(folder: Path) -> Any:
    return trained(model(), data(3))


@case
def adamw(folder: Path) -> Any:
    return trained(model(), data(53), optim_function="AdamW", weight_decay=0.1, learning_rate=0.01)


@case
def optimizer_made_before(folder: Path) -> Any:
    module = model()
    return trained(module, data(48), optim_function=torch.optim.Adam(module.parameters(), lr=0.01), learning_rate=0.01)


@case
def add_on_and_other_blocks(folder: Path) -> Any:
    if world() == 1:
        return trained(model(), data(48))
    kind = Trainer.add_on(ShardedDataParallel)
    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // world(), "shard": [nn.Linear]}
    module = model()
    trainer = kind(module, "cpu", **settings)
    history = trainer.fit(data(48), data(17), max_length=Epochs(1))
    rows = [history.get_latest_metric(name) for name in ("train_loss", "valid_loss", "valid_accuracy")]
    return {"weights": weights(module), "metrics": rows, "progress": trainer.context.progress.state_dict()}


class Tied(nn.Module):
    """A list of blocks, and two that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.ModuleList([nn.Linear(5, 5)])])

    def forward(self, inputs: Tensor) -> Tensor:
        inner: Any = self.blocks[1]
        outputs: Tensor = self.last(inner[0](self.blocks[0](self.first(inputs)).tanh()))
        return outputs


@case
def tied_weights(folder: Path) -> Any:
    torch.manual_seed(7)
    return trained(Tied().double(), data(48))


@case
def counted_items(folder: Path) -> Any:
    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        kept = targets == 1
        losses = nn.functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
        return {"loss": (losses * kept).sum() / kept.sum().clamp(min=1), "num_items": kept.sum()}

    return trained(model(), data(48), train_step=train_step)


@case
def windows_without_items(folder: Path) -> Any:
    """All processes but the first have no items in the first window."""

    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        inputs, targets, counts = batch
        losses = nn.functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
        number: Any = counts.sum()
        number = number if trainer.options.seed == 3 else int(number)
        return {"loss": (losses * counts).sum() / counts.sum().clamp(min=1), "num_items": number}

    def train(seed: int) -> list[float]:
        module, counts = model(), torch.ones(48)
        counts[4:12] = counts[16:24] = 0
        settings = {**SETTINGS, "accumulation_steps": 2, "shuffle": False, "seed": seed}
        settings["batch_size"] = GLOBAL_BATCH // world()
        trainer = layer(Trainer(module, "cpu", train_step=train_step, **settings))
        trainer.fit((*data(48), counts), max_length=Epochs(1))
        return weights(module)

    # Counts as tensors, which are never read on a device, and as numbers.
    return [train(3), train(4)]


def two_backward_passes(trainer: Any, batch: Any) -> dict[str, Any]:
    context, (inputs, targets) = trainer.context, batch
    for keeps in (True, False):
        loss = nn.functional.cross_entropy(trainer.model(inputs), targets)
        context.backward(loss)
        context.step(zero_grad=not keeps)
    return {"loss": loss.detach()}


@case
def gradients_that_are_averaged_twice(folder: Path) -> Any:
    """Two optimizers share a block; a step does not clear gradients to which another backward pass then adds."""

    class Shares(Trainer):
        def get_optimizer(self, model: nn.Module) -> Any:
            head: Any = model.head
            return [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.05)]

    def train(kind: Any, **settings: Any) -> list[float]:
        settings = {"seed": 3, "drop_last": False, "verbose": False, **settings}
        trainer = layer(kind(model(), "cpu", batch_size=GLOBAL_BATCH // world(), **settings))
        trainer.fit(data(53), max_length=Epochs(1))
        return weights(trainer.model)

    return [
        train(Shares),
        train(Shares, accumulation_steps=2),
        train(Trainer, optim_function="SGD", learning_rate=0.1, train_step=two_backward_passes),
    ]


@case
def inputs_of_a_backward_pass(folder: Path) -> Any:
    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        loss = nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])
        trainer.context.backward(loss, inputs=list(trainer.model.head.parameters()))
        trainer.context.step()
        return {"loss": loss.detach()}

    trainer = layer(Trainer(model(), "cpu", batch_size=4, train_step=train_step, verbose=False))
    try:
        trainer.fit(data(48), max_length=Epochs(1))
    except ConfigError as error:
        return str(error)
    return None


class Scaled(nn.Module):
    """A criterion with weights, which every process holds as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs * self.scale, targets)


@case
def criterion_with_weights(folder: Path) -> Any:
    """The weights after training with norms of all gradients, and in float16."""

    def train(clipping: GradientClipping, precision: Any) -> list[float]:
        module, criterion = model(torch.float32), Scaled()
        optimizer = torch.optim.SGD([*module.parameters(), *criterion.parameters()], lr=0.3)
        settings = {"seed": 3, "drop_last": False, "verbose": False, "batch_size": GLOBAL_BATCH // world()}
        plain = Trainer(module, "cpu", criterion=criterion, optimizer=optimizer, callbacks=[clipping], **settings)
        trainer = AMPTrainer(
            layer(plain), precision=precision, **({"init_scale": 256.0} if precision == "fp16" else {})
        )
        trainer.fit(data(48, torch.float32), max_length=Epochs(1))
        size = trainer.history.get_latest_metric("gradients_size")
        return [*weights(module), *criterion.scale.tolist(), size]

    return {
        "norm": train(GradientClipping(0.05, log=True), "fp32"),
        "largest": train(GradientClipping(0.05, norm_type=torch.inf, log=True), "fp32"),
        "value": train(GradientClipping(max_value=0.05, log=True), "fp32"),
        "float16": train(GradientClipping(0.05, log=True), "fp16"),
        "bfloat16": train(GradientClipping(0.05, log=True), "bf16"),
    }


@case
def averages_and_logged_clipping(folder: Path) -> Any:
    average = EMA(decay=0.5)
    found = trained(model(), data(48), epochs=2, callbacks=[average, GradientClipping(max_norm=0.05, log=True)])
    state = average.average_state_dict()
    return {**found, "weights": [whole(state[name]).tolist() for name in ("head.weight", "shift")]}


@case
def evaluated_before_and_trained_twice(folder: Path) -> Any:
    module = model()
    trainer = layer(Trainer(module, "cpu", **SETTINGS, batch_size=GLOBAL_BATCH // world()))
    before = trainer.evaluate(data(17))
    for epochs in (1, 2):
        trainer.fit(data(48), max_length=Epochs(epochs))
    rows = [before["loss"], trainer.evaluate(data(17))["loss"]]
    return {"weights": weights(module), "metrics": rows, "progress": trainer.context.progress.state_dict()}


@case
def low_precision(folder: Path) -> Any:
    def wrap(trainer: Trainer) -> Any:
        return AMPTrainer(layer(trainer), precision="fp16", init_scale=256.0)

    settings = {"accumulation_steps": 2, "gradient_clip": 0.1}
    return trained(model(torch.float32), data(48, torch.float32), wrap=wrap, **settings)


@case
def overflow_in_one_process(folder: Path) -> Any:
    """The scaler of every process skips the step."""

    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        outputs = trainer.model(inputs).float()
        if rank() == world() - 1 and trainer.context.progress.batches == 1:
            outputs.register_hook(lambda gradient: gradient * float("inf"))
        return {"loss": nn.functional.cross_entropy(outputs, targets)}

    trainer = AMPTrainer(
        layer(Trainer(model(torch.float32), "cpu", **SETTINGS, batch_size=4, train_step=train_step)), precision="fp16"
    )
    trainer.fit(data(48, torch.float32), max_length=Batches(3))
    return [trainer.context.progress.updates, trainer._get_precision().scaler.get_scale()]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, noise: Tensor) -> Tensor:
        doubt: Tensor = self.judge(self.maker(noise))
        return doubt


def duel(trainer: Any, batch: Any) -> dict[str, Any]:
    real, noise = batch
    context, pair = trainer.context, trainer.model
    makers, judges = context.optimizers
    bce = nn.functional.binary_cross_entropy_with_logits
    fake = pair.maker(noise)
    truth, lie = pair.judge(real), pair.judge(fake.detach())
    loss = bce(truth, torch.ones_like(truth)) + bce(lie, torch.zeros_like(lie))
    context.backward(loss)
    context.step(judges)
    doubt = pair.judge(fake)
    context.backward(bce(doubt, torch.ones_like(doubt)))
    context.step(makers)
    return {"loss": loss.detach()}


@case
def two_optimizers(folder: Path) -> Any:
    torch.manual_seed(5)
    pair = Pair().double()

    class Duel(Trainer):
        def get_optimizer(self, model: nn.Module) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.maker, model.judge)]

    settings = {"seed": 3, "drop_last": False, "verbose": False, "batch_size": GLOBAL_BATCH // world()}
    trainer = layer(Duel(pair, "cpu", train_step=duel, **settings))
    generator = torch.Generator().manual_seed(1)
    source = [torch.randn(50, width, generator=generator, dtype=torch.float64) for width in (5, 3)]
    trainer.fit(tuple(source), max_length=Epochs(1))
    return weights(pair)


@case
def window_whose_last_batch_skips_a_block(folder: Path) -> Any:
    """The maker computes in every second batch only; then the model is called as a whole."""
    torch.manual_seed(5)
    pair = Pair().double()

    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        (noise,) = batch
        context, pair = trainer.context, trainer.model
        is_even = context.progress.batches % 2 == 0
        loss = pair.judge(pair.maker(noise) if is_even else torch.cat((noise, noise[:, :2]), dim=1)).square().mean()
        context.backward(loss)
        context.step()
        return {"loss": loss.detach()}

    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // world(), "accumulation_steps": 2}
    trainer = layer(Trainer(pair, "cpu", train_step=train_step, **settings))
    source = torch.randn(72, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer.fit((source,), max_length=Epochs(1))
    return {"weights": weights(pair), "predicted": trainer.predict(source[:7]).tolist()}


# ------------------------------------------------------------------ passes of unequal length


@case
def evaluation(folder: Path) -> Any:
    trainer = layer(Trainer(model(), "cpu", val_batch_size=2, verbose=False))
    return [trainer.evaluate(data(size)) for size in (1, 2, 3, 7, 12)]


@case
def prediction(folder: Path) -> Any:
    trainer = layer(Trainer(model(), "cpu", val_batch_size=2, verbose=False))
    return [trainer.predict(data(size)[0]).tolist() for size in (1, 9)]


# ------------------------------------------------------------------ what a process holds


@case
def held_elements(folder: Path) -> Any:
    trainer = layer(Trainer(nn.Linear(60, 100, bias=False), "cpu", optim_function="Adam", verbose=False))
    trainer.fit((torch.zeros(8, 60), torch.zeros(8, dtype=torch.long)), max_length=Batches(1))
    parameter = trainer.model.weight
    kept = trainer.optimizer.state[parameter]["exp_avg"]
    return [tensor.to_local().numel() if world() > 1 else tensor.numel() for tensor in (parameter, kept)]


@case
def exported_weights(folder: Path) -> Any:
    trainer = layer(Trainer(model(), "cpu", **SETTINGS, batch_size=4))
    trainer.fit(data(24), max_length=Batches(1))
    path = trainer.save_model(folder / "model.safetensors")
    exported = trainer.export(folder / "exported.safetensors")
    # The first process has written both files.
    same = exported.read_bytes() == path.read_bytes() if rank() == 0 else None
    try:
        trainer.export(folder / "exported.pt2")
        graph = ""
    except ConfigError as error:
        graph = str(error)
    trained = weights(trainer.model)
    trainer.fit(data(24), max_length=Batches(2))
    changed = weights(trainer.model)
    trainer.load_model(path)
    return {"trained": trained, "changed": changed, "loaded": weights(trainer.model), "same": same, "graph": graph}


# ------------------------------------------------------------------ checkpoints


def noisy_trainer(folder: Path, **settings: Any) -> Any:
    torch.manual_seed(7)
    body = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.BatchNorm1d(7))
    module = nn.Sequential(body, nn.Linear(7, 2)).double()
    settings = {**SETTINGS, "optim_function": "AdamW", "batch_size": 4, "checkpoint_dir": folder, **settings}
    return layer(Trainer(module, "cpu", **settings))


def state_of(trainer: Any) -> dict[str, Any]:
    """Weights and optimizer, whole, as they print."""
    state = trainer.state_dict()
    kept = state["optimizers"][0]["state"]
    moments = {f"{number}.{name}": value.tolist() for number, of in kept.items() for name, value in of.items()}
    return {"model": {name: value.tolist() for name, value in state["model"].items()}, "optimizer": moments}


@case
def resumed(folder: Path) -> Any:
    uncut = noisy_trainer(folder / "whole", save_every=3)
    uncut.fit(data(50), data(17), max_length=Batches(8))
    first = noisy_trainer(folder / "halves", save_every=3)
    first.fit(data(50), data(17), max_length=Batches(4))
    second = noisy_trainer(folder / "halves", save_every=3)
    second.fit(data(50), data(17), max_length=Batches(8), resume="auto")
    newest = next(iter((folder / "halves").glob("ck_epoch_0_iter_3")))
    return {
        "whole": state_of(uncut),
        "halves": state_of(second),
        "left over": [path.name for path in folder.rglob(".*")],
        "files": sorted(path.name for path in newest.iterdir()),
    }


def begun_by_two(folder: Path) -> Path:
    return folder.parents[2] / "begun_by_two"


@case
def other_world_size(folder: Path) -> Any:
    """Two processes save; one and three, and the plain trainer, take it over."""
    place, trainer = begun_by_two(folder), noisy_trainer(folder)
    if world() == 2:
        trainer.fit(data(50), max_length=Batches(4), checkpoint_period=Batches(4))
        if rank() == 0:
            shutil.copytree(folder / "ck_epoch_0_iter_4", place)
    else:
        trainer.fit(data(50), max_length=Batches(4), resume=place, checkpoint_period=Batches(0))
    return {**state_of(trainer), "progress": trainer.context.progress.state_dict()}


@case
def started_by_a_plain_trainer(folder: Path) -> Any:
    def make(wrap: Callable[..., Any], seed: int = 8) -> Any:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)).double()
        return wrap(Trainer(module, "cpu", **{**SETTINGS, "optim_function": "AdamW"}, batch_size=4))

    plain = make(lambda trainer: trainer, seed=7)
    plain.fit(data(50), max_length=Batches(3))
    path = plain.save_checkpoint(folder / str(rank()))
    inside, before = make(layer), make(layer)
    inside.fit(data(50), max_length=Batches(3), resume=path)
    loaded = state_of(inside)
    before.load_checkpoint(path)
    for trainer in (inside, before):
        trainer.fit(data(50), max_length=Batches(6))
    return {
        "plain": state_of(plain),
        "loaded": loaded,
        "in the run": state_of(inside),
        "before the run": state_of(before),
    }


class LoadsInside(Callback):
    """Loads a checkpoint in the middle of a run, in all processes together, and notes the error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: str | None = None

    def on_train_start(self, context: Any) -> None:
        try:
            context.run.trainer.load_checkpoint(self.path)
        except CheckpointError as error:
            self.error = str(error)


@case
def damaged_shard(folder: Path) -> Any:
    if world() == 1:
        return None
    trainer = noisy_trainer(folder, save_every=2)
    trainer.fit(data(50), max_length=Batches(4))
    newest = folder / "ck_epoch_0_iter_4"
    file = newest / f"shard-00001-of-0000{world()}.safetensors"
    trainer.evaluate(data(12))  # in which all wait for each other
    if rank() == 0:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    trainer.evaluate(data(12))
    watch = LoadsInside(newest)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = noisy_trainer(folder, save_every=2, callbacks=[watch])
        trainer.fit(data(50), max_length=Batches(3), resume="auto")
    return {
        "named": watch.error,
        "warned": [str(it.message) for it in caught],
        "batches": trainer.context.progress.batches,
    }


@case
def error_in_one_process(folder: Path) -> Any:
    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        if rank() == world() - 1 and trainer.context.progress.batches == 2:
            raise ArithmeticError("the last process has had enough")
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(trainer.model(inputs), targets)}

    trainer = layer(Trainer(model(), "cpu", **SETTINGS, batch_size=2, train_step=train_step))
    try:
        trainer.fit(data(48), max_length=Epochs(2))
    except (ArithmeticError, PeerError) as error:
        return [type(error).__name__, str(error)]
    return None


def run_all(folder: Path) -> dict[str, Any]:
    found = {}
    wanted = sys.argv[2:] or CASES
    for name in wanted:
        place = folder / "places" / name
        place.mkdir(parents=True, exist_ok=True)
        found[name] = CASES[name](place)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A group that waits for itself says where.
    faulthandler.dump_traceback_later(180, exit=True)
    target = Path(sys.argv[1])
    results = run_all(target)
    (target / f"{rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    # Torch's threads sometimes abort a process of a group at its very end, when all is done.
    os._exit(0)
