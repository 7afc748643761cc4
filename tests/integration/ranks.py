"""What one process of a group does in `test_data_parallel.py`: `python ranks.py FOLDER`, with torchrun's variables set.

Every case is a function that trains and returns plain values; the results of each rank go to `FOLDER/<rank>.json`.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from window_ranks import CASES as WINDOWS

from dovetail import Batches, Epochs, Tokens
from dovetail.callbacks import EMA, Callback, ReduceOnPlateau
from dovetail.checkpoint import CheckpointWarning
from dovetail.compat import zae_engine
from dovetail.distributed import PeerError
from dovetail.distributed import whole as whole_tensor
from dovetail.errors import ConfigError, DataError
from dovetail.trainers import (
    AMPTrainer,
    AutoBatchTrainer,
    DDPTrainer,
    FSDPTrainer,
    SingleProcessAMP,
    Trainer,
    WholePass,
)
from dovetail.trainers.reuse import reset

CASES: dict[str, Callable[..., Any]] = {}
GLOBAL_BATCH = 12


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def layer(trainer: Trainer, bucket_size: int = 128) -> Any:
    """The trainer of a group, or the plain one where there is none; small messages travel during the backward pass."""
    return DDPTrainer(trainer, bucket_size=bucket_size) if world() > 1 else trainer


def data(size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, (inputs.sum(dim=1) > 0).long()


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def weights(module: nn.Module) -> list[float]:
    values = (whole_tensor(it).detach() for it in module.parameters())
    real = (torch.view_as_real(it) if it.is_complex() else it for it in values)
    return torch.cat([it.double().flatten() for it in real]).tolist()


SETTINGS: dict[str, Any] = {
    "optim_function": "SGD",
    "learning_rate": 0.3,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "seed": 3,
    "drop_last": False,
    "verbose": False,
}


def trained(
    module: nn.Module,
    source: Any,
    epochs: int = 2,
    wrap: Callable[..., Any] = layer,
    inner: Callable[..., Any] = Trainer,
    **settings: Any,
) -> Any:
    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // world(), **settings}
    trainer = wrap(inner(module, "cpu", **{name: it for name, it in settings.items() if it is not None}))
    history = trainer.fit(source, data(17, source[0].dtype), max_length=Epochs(epochs))
    rows = [history.get_latest_metric(name) for name in ("train_loss", "valid_loss", "valid_accuracy")]
    return {"weights": weights(module), "metrics": rows, "progress": trainer.context.progress.state_dict()}


def one_hot_share(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.softmax(dim=1).gather(1, targets[:, None]) > 0.5).double().mean()


# ------------------------------------------------------------------ equalities with one process


@case
def evaluation(folder: Path) -> Any:
    from torchmetrics.classification import MulticlassF1Score

    whole = WholePass(lambda outputs, targets: (outputs[:, 0] * targets).square().mean().sqrt())
    metrics = {"f1": MulticlassF1Score(2), "share": one_hot_share, "whole": whole, "auroc": "auroc"}
    trainer = layer(Trainer(model(), "cpu", metrics=metrics, val_batch_size=2, verbose=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [{name: str(value) for name, value in trainer.evaluate(data(size)).items()} for size in range(34)]


@case
def prediction(folder: Path) -> Any:
    trainer = layer(zae_engine.Trainer(model(), "cpu", val_batch_size=2, verbose=False))
    inferred = [batch.tolist() for batch in trainer.inference(data(10))]
    return [*(trainer.predict(data(size)[0]).tolist() for size in (1, 10)), inferred]


class UnevenStream(IterableDataset[Any]):
    """Samples of which the first process reads one batch, and the others share the rest."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        while self.numbers:
            number, *self.numbers = self.numbers
            inputs, targets = data(23)
            yield inputs[number], targets[number]

    def split(self, rank: int, world: int) -> UnevenStream:
        if world == 1:
            return UnevenStream(self.numbers)
        return UnevenStream(self.numbers[:2] if rank == 0 else self.numbers[1 + rank :: world - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]


@case
def uneven_stream(folder: Path) -> Any:
    metrics = {"count": WholePass(lambda outputs, targets: float(len(targets))), "auroc": "auroc"}
    trainer = layer(Trainer(model(), "cpu", metrics=metrics, test_batch_size=2, verbose=False))
    predicted = trainer.predict(UnevenStream(list(range(23)))).tolist()
    return {"predicted": sorted(predicted), "metrics": trainer.evaluate(UnevenStream(list(range(23))))}


@case
def even_batches(folder: Path) -> Any:
    return trained(model(), data(48))


@case
def uneven_batches(folder: Path) -> Any:
    return trained(model(), data(53))


@case
def clipping(folder: Path) -> Any:
    return trained(model(), data(53), gradient_clip=0.05)


@case
def accumulation(folder: Path) -> Any:
    # Windows of the same samples: of 2 batches of 6 each here, of 2·12/world there.
    return trained(model(), data(60), accumulation_steps=2, gradient_clip=0.1)


@case
def idle_inside_a_window(folder: Path) -> Any:
    # The last window has two steps, and in its second one some processes have no batch.
    return trained(model(), data(42), accumulation_steps=2, gradient_clip=0.1)


# The optimizers of these cases have their own rates.
OWN_RATES: dict[str, Any] = dict.fromkeys(("optim_function", "learning_rate", "momentum", "weight_decay"))


class Alternates(Callback):
    """Trains the first layer in the first epoch, the last one in the second, and so on: equally many parameters."""

    def on_epoch_start(self, context: Any) -> None:
        is_even = context.progress.epoch % 2 == 0
        context.model[0].requires_grad_(is_even)
        context.model[2].requires_grad_(not is_even)


@case
def alternating_layers(folder: Path) -> Any:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    return trained(module, data(48), epochs=3, optimizer=optimizer, callbacks=[Alternates()], **OWN_RATES)


class TwoParts(Trainer):
    """Two optimizers: one for the last layer of the model, one for the first."""

    def get_optimizer(self, model: nn.Module) -> Any:
        parts: Any = model
        return [torch.optim.SGD(part.parameters(), lr=0.2, momentum=0.5) for part in (parts[2], parts[0])]


@case
def idle_inside_a_window_of_two_optimizers(folder: Path) -> Any:
    # Some processes have no batch in the last two steps of the last window of four.
    settings = {"inner": TwoParts, "accumulation_steps": 4, "gradient_clip": 0.1, **OWN_RATES}
    return trained(model(), data(30), **settings)


def steps_in_turns(trainer: Any, batch: Any) -> dict[str, Any]:
    """Step the optimizers by hand: the first one twice, the second one in every second batch."""
    inputs, targets = batch
    context = trainer.context
    first, second = context.optimizers

    def loss() -> Tensor:
        return nn.functional.cross_entropy(trainer.model(inputs), targets)

    before = loss()
    context.backward(before)
    context.step(first, zero_grad=context.progress.batch != 4)
    context.backward(loss())
    context.step(first)
    if context.progress.batches % 2 == 0:
        context.backward(0.5 * loss())
        context.step(second)
    return {"loss": before.detach()}


@case
def idle_inside_a_window_of_manual_steps(folder: Path) -> Any:
    settings = {"inner": TwoParts, "train_step": steps_in_turns, "accumulation_steps": 3, **OWN_RATES}
    return join([trained(model(), data(size), **settings) for size in (42, 51, 54)])


@case
def graphs_of_gradients(folder: Path) -> Any:
    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(trainer.model(inputs), targets)
        trainer.context.backward(loss, create_graph=True)
        trainer.context.step()
        return {"loss": loss.detach()}

    with warnings.catch_warnings():
        # Torch warns of the reference cycle of a gradient and its graph.
        warnings.simplefilter("ignore")
        return trained(model(), data(53), train_step=train_step)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner, self.outer = nn.Linear(5, 4), nn.Linear(4, 2)
        self.turns = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))
        self.more = nn.Parameter(torch.randn(4, 2, dtype=torch.complex128))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        turned = self.inner(inputs).tanh() * self.turns.prod(dim=0)
        return (turned @ self.more).real + self.outer(turned.abs())  # type: ignore[no-any-return]  # untyped module


@case
def complex_parameters(folder: Path) -> Any:
    return trained(Complex(), data(53), gradient_clip=0.5)


class WeightedClasses(nn.Module):
    """Cross entropy with learnable weights of the classes, which every process draws itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(rank())
        self.weights = nn.Parameter(torch.rand(2, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs * self.weights, targets)


def parameters_outside(wrap: Callable[..., Any]) -> Any:
    """Train parameters of the loss, and parameters that only the optimizer has."""
    found = []
    for is_known in (True, False):
        module, loss = model(), WeightedClasses()

        def train_step(trainer: Any, batch: Any, loss: nn.Module = loss) -> Any:
            return {"loss": loss(trainer.model(batch[0]), batch[1])}

        own: dict[str, Any] = {"criterion": loss} if is_known else {"train_step": train_step}
        own |= {"metrics": {"accuracy": one_hot_share}, **OWN_RATES}
        optimizer = torch.optim.SGD([*module.parameters(), *loss.parameters()], lr=0.3, momentum=0.9)
        result = trained(module, data(53), wrap=wrap, optimizer=optimizer, **own)
        found.append({**result, "weights": result["weights"] + weights(loss)})
    return join(found)


def join(runs: list[Any]) -> Any:
    """Return the results of several runs as one."""
    joined = {name: [number for run in runs for number in run[name]] for name in ("weights", "metrics")}
    return {**joined, "progress": [run["progress"] for run in runs]}


@case
def parameters_outside_of_the_model(folder: Path) -> Any:
    return parameters_outside(layer)


@case
def parameters_outside_of_a_sharded_model(folder: Path) -> Any:
    return parameters_outside(FSDPTrainer if world() > 1 else layer)


@case
def less_data_than_processes(folder: Path) -> Any:
    return trained(model(), data(3))


@case
def counted_items(folder: Path) -> Any:
    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        kept = targets == 1
        losses = nn.functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
        return {"loss": (losses * kept).sum() / kept.sum().clamp(min=1), "num_items": kept.sum()}

    return trained(model(), data(48), train_step=train_step)


def count_tokens(folder: Path, *, manual: bool, **settings: Any) -> Any:
    """Train to a length in tokens, of which each sample has another number, and return progress and weights."""

    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(trainer.model(inputs), targets)
        if manual:
            trainer.context.backward(loss)
            trainer.context.step()
        return {"loss": loss, "num_tokens": (inputs > 0).sum() * 3001}

    module = model()
    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // world(), "train_step": train_step, **settings}
    trainer = layer(Trainer(module, "cpu", checkpoint_dir=folder / f"{manual}", **settings))
    history = trainer.fit(
        data(53), data(17), max_length=Tokens(1_000_000), validation_period=Tokens(300_000), checkpoint_period=Epochs(1)
    )
    validated = [row["batches"] for row in history if row["stage"] == "valid"]
    return {"weights": weights(module), "metrics": validated, "progress": trainer.context.progress.state_dict()}


@case
def counted_tokens(folder: Path) -> Any:
    return count_tokens(folder, manual=False)


@case
def tokens_of_manual_steps(folder: Path) -> Any:
    return count_tokens(folder, manual=True)


@case
def weights_of_samples_and_classes(folder: Path) -> Any:
    inputs, targets = data(53)
    importance = torch.arange(53, dtype=torch.float64) % 5
    settings = {"sample_weight": True, "class_weight": {1: 3.0}, "accumulation_steps": 2}
    return trained(model(), (inputs, targets, importance), **settings)


def synced(trainer: Trainer) -> Any:
    return DDPTrainer(trainer, sync_batchnorm=True) if world() > 1 else trainer


def normed_model() -> nn.Module:
    torch.manual_seed(7)
    norms = nn.BatchNorm1d(6), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4, affine=False)
    parts = [nn.Linear(5, 6), norms[0], nn.Tanh(), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), norms[1], nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(8, 4), norms[2], nn.Linear(4, 2)).double()


def trained_with_norms(size: int, **settings: Any) -> Any:
    """Train with synchronised batch norms, and return also their running statistics and the names of the state."""
    module = normed_model()
    found = trained(module, data(size), wrap=synced, **settings)
    statistics = [number for buffer in module.buffers() for number in buffer.double().flatten().tolist()]
    # Nothing of the layer is left in the model.
    assert not any("forward" in vars(part) for part in module.modules())
    return {**found, "weights": found["weights"] + statistics, "names": list(module.state_dict())}


@case
def synced_norms(folder: Path) -> Any:
    # The last batch has 5 samples, of which one process has none and another one fewer than before.
    return trained_with_norms(53)


@case
def synced_norms_in_windows(folder: Path) -> Any:
    return trained_with_norms(53, accumulation_steps=2, gradient_clip=0.5)


@case
def synced_norms_and_counted_items(folder: Path) -> Any:
    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        kept = 1 + 3 * targets
        losses = nn.functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
        return {"loss": (losses * kept).sum() / kept.sum(), "num_items": kept.sum()}

    return trained_with_norms(53, train_step=train_step)


@case
def synced_norms_in_low_precision(folder: Path) -> Any:
    module = normed_model().float()
    settings = {**SETTINGS, "learning_rate": 0.05, "batch_size": GLOBAL_BATCH // world()}
    # The average of the weights is a copy of the model, made during the run.
    trainer = AMPTrainer(synced(Trainer(module, "cpu", callbacks=[EMA(decay=0.5)], **settings)), precision="bf16")
    trainer.fit(data(48, torch.float32), data(17, torch.float32), max_length=Epochs(1))
    return weights(module)


@case
def synced_norms_and_micro_batches(folder: Path) -> Any:
    settings = {**SETTINGS, "batch_size": 4}
    try:
        AutoBatchTrainer(synced(Trainer(normed_model(), "cpu", **settings))).fit(data(24), max_length=Epochs(1))
    except ConfigError as error:
        return str(error)
    return None


@case
def low_precision(folder: Path) -> Any:
    def wrap(trainer: Trainer) -> Any:
        return AMPTrainer(layer(trainer), precision="fp16", init_scale=256.0)

    settings = {"accumulation_steps": 2, "gradient_clip": 0.1}
    return trained(model(torch.float32), data(48, torch.float32), wrap=wrap, **settings)


@case
def other_order_of_layers(folder: Path) -> Any:
    module = model(torch.float32)
    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // world()}
    trainer = layer(SingleProcessAMP(module, "cpu", precision="bf16", **settings))
    trainer.fit(data(48, torch.float32), max_length=Epochs(2))
    return weights(module)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(3, 5), nn.Linear(5, 1)


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
    pair = Pair()

    def make(module: Any) -> list[torch.optim.Optimizer]:
        parts = (module.maker, module.judge)
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5) for part in parts]

    class Duel(Trainer):
        def get_optimizer(self, model: nn.Module) -> Any:
            return make(model)

    settings = {"seed": 3, "drop_last": False, "verbose": False, "batch_size": GLOBAL_BATCH // world()}
    trainer = AMPTrainer(layer(Duel(pair, "cpu", train_step=duel, **settings)), precision="bf16")
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(48, 5, generator=generator), torch.randn(48, 3, generator=generator)
    trainer.fit(source, max_length=Epochs(2))
    return weights(pair)


# ------------------------------------------------------------------ metrics without synchronisation


class PassesOfRank:
    """Counts passes upwards in the first process and downwards in the others, so that each would decide differently."""

    passes = 0

    def reset(self) -> None:
        self.passes += 1 if rank() == 0 else -1

    def update(self, outputs: Any, targets: Any) -> None: ...

    def compute(self) -> float:
        return float(self.passes)


class OwnValidation(Trainer):
    """Adds a number that is different in every process to a validation, and to an epoch."""

    def train_epoch(self) -> Any:
        return {**super().train_epoch(), "rank": torch.tensor(rank())}

    def val_epoch(self) -> Any:
        return {**super().val_epoch(), "rank": torch.tensor(rank()), "undefined": float("nan")}


class Received(Callback):
    def __init__(self) -> None:
        self.metrics: list[Any] = []

    def on_validation_end(self, context: Any, metrics: Any) -> None:
        self.metrics.append({name: str(float(value)) for name, value in metrics.items()})

    on_epoch_end = on_validation_end


@case
def metrics_of_one_process(folder: Path) -> Any:
    module, received = model(), Received()
    callbacks = [ReduceOnPlateau("valid_own", mode="max", patience=0), received]
    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // world(), "metrics": {"own": PassesOfRank()}}
    settings |= {"callbacks": callbacks, "best_metric": "valid_own", "best_mode": "max", "save_best": True}
    trainer = layer(OwnValidation(module, "cpu", checkpoint_dir=folder, save_every=-1, **settings))
    trainer.fit(data(24), data(17), max_length=Epochs(3))
    found = {"weights": weights(module), "metrics": received.metrics, "best": trainer.context.run.saver.best}
    return {**found, "evaluated": trainer.evaluate(data(17))["own"], "rate": trainer.optimizer.param_groups[0]["lr"]}


# ------------------------------------------------------------------ data of other forms


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        inputs, targets = data(29)
        yield from zip(inputs, targets, strict=True)


class Seen(Callback):
    """Notes the first feature of every sample that this process trains on and that counts."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.batches = 0

    def on_step_end(self, context: Any, output: Any) -> None:
        self.batches += 1
        if context.run.batch.num_samples:
            self.samples += context.state["inputs"]


def noting(trainer: Any, batch: Any) -> dict[str, Any]:
    inputs, targets = batch
    trainer.context.state["inputs"] = inputs[:, 0].tolist()
    return {"loss": nn.functional.cross_entropy(trainer.model(inputs), targets)}


def seen(source: Any, epochs: int = 1, **settings: Any) -> dict[str, Any]:
    watch = Seen()
    settings = {**SETTINGS, "batch_size": 4, "callbacks": [watch], "train_step": noting, **settings}
    module = model()
    layer(Trainer(module, "cpu", **settings)).fit(source, max_length=Epochs(epochs))
    return {"samples": watch.samples, "batches": watch.batches, "weights": weights(module)}


class CountingLoss(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(outputs, targets)


@case
def stream(folder: Path) -> Any:
    return seen(DataLoader(Stream(), batch_size=4))


@case
def generator_without_length(folder: Path) -> Any:
    inputs, targets = data(29)

    class Batched:
        def __iter__(self) -> Iterator[Any]:
            return zip(inputs.split(4), targets.split(4), strict=True)

    return seen(Batched(), accumulation_steps=2)


@case
def shuffled_by_torch(folder: Path) -> Any:
    torch.manual_seed(rank())
    return seen(DataLoader(TensorDataset(*data(29)), batch_size=4, shuffle=True))


class Uneven(DistributedSampler[Any]):
    """Gives one process its first samples only, or none; there is no such process in a group of one."""

    def __init__(self, dataset: Any, short: int, size: int = 8) -> None:
        super().__init__(dataset, num_replicas=world(), rank=rank(), shuffle=False)
        self.is_short = rank() == short and world() > 1
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        numbers = list(super().__iter__())
        return iter(numbers[: self.size] if self.is_short else numbers)

    def __len__(self) -> int:
        return self.size if self.is_short else super().__len__()


class UnevenWithoutLength(Uneven):
    """As a stream: all processes find out after each batch whether any of them has another one."""

    def __len__(self) -> int:
        raise TypeError


class Counts(nn.Module):
    """Has two buffers: the number of its calls, in place, and the sum of its inputs, in a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(5, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.total = self.total + inputs.detach().sum(dim=0)
        return inputs


def counting_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(Counts(), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 2)).double()


@case
def buffers_of_idle_batches(folder: Path) -> Any:
    """Buffers of the model and of the loss, and the mean over the samples of this process."""
    inputs, targets = data(48)
    dataset = TensorDataset(inputs, targets)
    sampler: Any = Uneven(dataset, short=world() - 1)
    module: Any = counting_model()
    criterion = CountingLoss()
    trainer = layer(Trainer(module, "cpu", criterion=criterion, **SETTINGS))
    trainer.fit(DataLoader(dataset, batch_size=4, sampler=sampler), max_length=Epochs(2))
    own = torch.stack(torch.split(inputs[list(sampler)], 4)).mean(dim=1).mean(dim=0)
    counts, norm = module[0], module[1]
    return {
        "batches": len(list(sampler)) // 4 * 2,
        "calls": [float(it) for it in (counts.calls, norm.num_batches_tracked, criterion.calls)],
        "mean": own.tolist(),
        "means": [(counts.total / counts.calls / 4).tolist(), norm.running_mean.tolist()],
    }


class Calls(Callback):
    """The calls that buffers of the model count, at the start of each validation and at the end of the run."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def _note(self, context: Any) -> None:
        self.found.append(float(context.model[0].calls))

    def on_test_step_end(self, context: Any, output: Any) -> None:
        self._note(context)

    def on_train_end(self, context: Any) -> None:
        self._note(context)


@case
def buffers_of_a_first_process_without_batches(folder: Path) -> Any:
    """The calls that the buffers of each process count if the first one has only two batches."""
    dataset = TensorDataset(*data(48))
    found = {}
    runs: dict[str, Any] = {
        "at the end": {"max_length": Epochs(1)},
        "after a stop": {"max_length": Batches(4)},
        "validated": {"max_length": Epochs(1), "val_data": data(2), "validation_period": Batches(3)},
    }
    for name, arguments in runs.items():
        calls = Calls()
        trainer = layer(Trainer(counting_model(), "cpu", callbacks=[calls], **SETTINGS))
        trainer.fit(DataLoader(dataset, batch_size=4, sampler=UnevenWithoutLength(dataset, short=0)), **arguments)
        found[name] = calls.found
    return found


@case
def first_process_without_data(folder: Path) -> Any:
    dataset = TensorDataset(*data(48))
    trainer = layer(Trainer(counting_model(), "cpu", **SETTINGS))
    sampler = UnevenWithoutLength(dataset, short=0, size=0)
    trainer.fit(DataLoader(dataset, batch_size=4, sampler=sampler), max_length=Epochs(1))
    return {"records": trainer.context.progress.records, "calls": float(trainer.model[0].calls)}


class Named(NamedTuple):
    first: Tensor
    second: Tensor


class NamedModel(nn.Module):
    """Returns a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, inputs: Tensor) -> Named:
        return Named(self.inner(inputs), inputs)


@case
def named_tuples(folder: Path) -> Any:
    """A single named batch, which the other processes compute along, and named predictions."""

    def step(trainer: Any, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(trainer.model(batch.first).first, batch.second)}

    inputs, targets = data(24)
    trainer = layer(Trainer(NamedModel(), "cpu", train_step=step, **SETTINGS))
    trainer.fit([Named(inputs, targets)], max_length=Epochs(1))
    predicted = trainer.predict(DataLoader(inputs, batch_size=4))
    return {"records": trainer.context.progress.records, "rows": [len(predicted.first), len(predicted.second)]}


@case
def batch_that_cannot_be_sent(folder: Path) -> Any:
    @dataclass
    class Own:
        inputs: Tensor

    def step(trainer: Any, batch: Any) -> dict[str, Any]:
        return {"loss": trainer.model(batch.inputs).square().mean()}

    try:
        layer(Trainer(model(), "cpu", train_step=step, **SETTINGS)).fit([Own(data(24)[0])], max_length=Epochs(1))
    except (DataError, PeerError) as error:
        return str(error)
    return None


class ShortSecondEpoch(Uneven):
    """Gives the first process fewer batches in the second epoch only."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.is_short = rank() == 0 and world() > 1 and epoch == 1


@case
def lengths_that_change(folder: Path) -> Any:
    dataset = TensorDataset(*data(48))
    trainer = layer(Trainer(model(), "cpu", **SETTINGS))
    loader = DataLoader(dataset, batch_size=4, sampler=ShortSecondEpoch(dataset, short=-1))
    trainer.fit(loader, max_length=Epochs(3))
    return trainer.context.progress.state_dict()


@case
def distributed_sampler(folder: Path) -> Any:
    dataset = TensorDataset(*data(28))
    sampler: Any = DistributedSampler(dataset, num_replicas=world(), rank=rank())
    found = seen(DataLoader(dataset, batch_size=4, sampler=sampler), epochs=2)
    half = len(found["samples"]) // 2
    return {**found, "samples": found["samples"][:half], "again": found["samples"][half:]}


@case
def closures(folder: Path) -> Any:
    module = model()
    trainer = layer(Trainer(module, "cpu", optimizer=torch.optim.LBFGS(module.parameters()), verbose=False))
    try:
        trainer.fit(data(24), max_length=Epochs(1))
    except ConfigError as error:
        return str(error)
    return None


@case
def unequal_lengths(folder: Path) -> Any:
    """The messages about data of each process with another length, by the part of the run that needs the length."""
    runs: dict[str, tuple[dict[str, Any], Any]] = {
        "plain": ({}, Epochs(1)),
        "window": ({"accumulation_steps": 2}, Epochs(1)),
        "period": ({}, Batches(3)),
        "schedule": ({"lr_scheduler": "cosine"}, Epochs(1)),
    }
    found = {}
    for name, (settings, length) in runs.items():
        trainer = layer(Trainer(model(), "cpu", batch_size=4, verbose=False, **settings))
        try:
            trainer.fit(data(24 + 12 * rank()), max_length=length)
        except DataError as error:
            found[name] = str(error)
    return found


def words() -> tuple[Tensor, Tensor]:
    found = torch.randint(0, 10, (24, 2), generator=torch.Generator().manual_seed(1))
    return found, found[:, 0] % 8


def embedding() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten())


@case
def impossible_models(folder: Path) -> Any:
    """The messages about models and optimizers that several processes cannot train."""
    lazy = nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(2)).double()
    sparse = embedding()
    own = torch.optim.SparseAdam(list(sparse.parameters()))
    by_name = {"weight_decay": 0.0, "optim_function": "SGD"}
    kinds: list[tuple[str, Any, nn.Module, dict[str, Any]]] = [
        ("lazy", data(24), lazy, by_name),
        ("sparse", words(), embedding(), by_name),
        ("sparse optimizer", words(), sparse, {"optimizer": own}),
    ]
    found = {}
    for name, source, module, settings in kinds:
        for wrap in [DDPTrainer, FSDPTrainer] if world() > 1 else [Trainer]:
            trainer = Trainer(module, "cpu", batch_size=6, verbose=False, **settings)
            try:
                (wrap(trainer) if world() > 1 else trainer).fit(source, max_length=Epochs(1))
            except ConfigError as error:
                found[f"{name} {wrap.__name__}"] = str(error)
    return found


# ------------------------------------------------------------------ agreement


class StopsAlone(Callback):
    """Asks to stop in the last process only."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def _ask(self, context: Any) -> None:
        if rank() == world() - 1 and context.progress.batches >= 3:
            context.stop("enough")

    def on_step_end(self, context: Any, output: Any) -> None:
        if self.hook == "step":
            self._ask(context)

    def on_epoch_end(self, context: Any, metrics: Any) -> None:
        if self.hook == "epoch":
            self._ask(context)


@case
def stop(folder: Path) -> Any:
    found = []
    for hook in ("step", "epoch"):
        settings = {**SETTINGS, "batch_size": 2, "callbacks": [StopsAlone(hook)]}
        trainer = layer(Trainer(model(), "cpu", **settings))
        trainer.fit(data(48), max_length=Epochs(4))
        found.append([trainer.context.run.stop_reason, trainer.context.progress.state_dict()])
    return found


@case
def stop_at_the_end_of_one_process(folder: Path) -> Any:
    """The request arrives in the fourth step, which is the last one of the first process."""
    dataset = TensorDataset(*data(60))
    trainer = layer(Trainer(model(), "cpu", **{**SETTINGS, "callbacks": [StopsAlone("step")]}))
    trainer.fit(DataLoader(dataset, batch_size=4, sampler=Uneven(dataset, short=0, size=16)), max_length=Epochs(2))
    return trainer.context.progress.state_dict()


@case
def different_noise(folder: Path) -> Any:
    trainer = layer(Trainer(model(), "cpu", **SETTINGS))
    trainer.fit(data(24), max_length=Epochs(1))
    return torch.rand(1).item()


@case
def written_after_a_run(folder: Path) -> Any:
    trainer = layer(Trainer(model(), "cpu", **SETTINGS))
    trainer.fit(data(24), max_length=Epochs(1))
    return trainer.save_model(folder / f"{rank()}.safetensors").exists()


# ------------------------------------------------------------------ checkpoints


def noisy_trainer(folder: Path, **settings: Any) -> Any:
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    settings = {**SETTINGS, "batch_size": 4, "checkpoint_dir": folder, "save_every": 3, **settings}
    return layer(Trainer(module, "cpu", **settings))


@case
def resumed(folder: Path) -> Any:
    whole = noisy_trainer(folder / "whole")
    whole.fit(data(50), data(17), max_length=Epochs(2))
    first = noisy_trainer(folder / "halves")
    first.fit(data(50), data(17), max_length=Batches(4))
    second = noisy_trainer(folder / "halves")
    second.fit(data(50), data(17), max_length=Epochs(2), resume="auto")
    states = [{name: value.tolist() for name, value in it.model.state_dict().items()} for it in (whole, second)]
    return {
        "whole": states[0],
        "halves": states[1],
        "draws": torch.rand(1).item(),
        "files": sorted(path.name for path in (folder / "halves").iterdir()) if rank() == 0 else [],
    }


@case
def last_write_fails(folder: Path) -> Any:
    if rank() == 0:
        # A checkpoint does not replace a file of the user.
        (folder / "ck_epoch_1_iter_2").touch()
    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // world(), "save_every": -1, "on_save_error": "warn"}
    trainer = layer(Trainer(model(), "cpu", checkpoint_dir=folder, **settings))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(data(24), max_length=Epochs(1))
    failed = [str(it.message) for it in caught if issubclass(it.category, CheckpointWarning)]
    return {"failed": failed, "epoch": trainer.context.progress.epoch}


@case
def other_world_size(folder: Path) -> Any:
    """Two processes end in the middle of an epoch; one and three processes continue it."""
    watch = Seen()
    settings = {**SETTINGS, "batch_size": 2, "callbacks": [watch], "train_step": noting, "checkpoint_dir": folder}
    trainer = layer(Trainer(model(), "cpu", **settings))
    source = DataLoader(TensorDataset(*data(29)), batch_size=2)
    place = folder.parents[2] / "begun_by_two"
    if world() == 2:
        trainer.fit(source, max_length=Batches(4), checkpoint_period=Batches(0))
        trainer.save_checkpoint(place)
    else:
        trainer.fit(source, max_length=Epochs(1), resume=place, checkpoint_period=Batches(0))
    return {"samples": watch.samples, "progress": trainer.context.progress.state_dict()}


@case
def mean_of_a_continued_epoch(folder: Path) -> Any:
    """Two processes write a checkpoint in an epoch, which one and three processes continue; the rate is 0."""
    module, place = model(), folder.parents[2] / "mean_of_two"
    optimizer, source = torch.optim.SGD(module.parameters(), lr=0.0), DataLoader(TensorDataset(*data(29)), batch_size=2)
    trainer = layer(Trainer(module, "cpu", optimizer=optimizer, checkpoint_dir=folder, verbose=False))
    trainer.fit(source, max_length=Epochs(1), checkpoint_period=Batches(4), resume=None if world() == 2 else place)
    if world() == 2 and rank() == 0:
        shutil.copytree(folder / "ck_epoch_0_iter_4", place)
    return trainer.history.get_latest_metric("train_loss")


@case
def python_calls(folder: Path) -> Any:
    """The calls of Dovetail functions that a layer adds to one step."""
    cost = runpy.run_path(str(Path(__file__).parents[1] / "trainers" / "counting.py"))

    def own_calls(wrap: Callable[[Any], Any]) -> float:
        def prepare() -> Callable[[Any], Any]:
            trainer = wrap(cost["make_trainer"](nonfinite="ignore"))
            return lambda batches: trainer.fit(batches * world(), max_length=Epochs(1))

        found: float = cost["calls_per_step"](prepare)[1]
        return found

    def whole(trainer: Any) -> Any:
        return layer(trainer, bucket_size=2**20)

    alone = own_calls(whole)
    return {"amp": own_calls(lambda it: AMPTrainer(whole(it), precision="bf16")) - alone, "all": alone}


# ------------------------------------------------------------------ the end


@case
def error_in_one_process(folder: Path) -> Any:
    class Fails(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            if rank() == world() - 1 and context.progress.batches == 2:
                raise ArithmeticError("the last process has had enough")

    trainer = layer(Trainer(model(), "cpu", **SETTINGS, batch_size=2, callbacks=[Fails()]))
    try:
        trainer.fit(data(48), max_length=Epochs(2))
    except (ArithmeticError, PeerError) as error:
        return [type(error).__name__, str(error)]
    return None


@case
def a_new_run_after_an_error_inside_a_step(folder: Path) -> Any:
    class FailsOnce(Callback):
        is_over = False

        def on_gradients(self, context: Any, optimizer: Any) -> None:
            if not self.is_over:
                self.is_over = True
                raise ArithmeticError

    trainer = layer(Trainer(model(), "cpu", **SETTINGS, batch_size=2, callbacks=[FailsOnce()]))
    try:
        trainer.fit(data(48), max_length=Epochs(1))
    except (ArithmeticError, PeerError):
        reset(trainer)
    trainer.options.batch_size = 4
    trainer.fit(max_length=Epochs(1))
    return trainer.context.progress.records


def run_all(folder: Path) -> dict[str, Any]:
    found = {}
    for name, function in (CASES | WINDOWS).items():
        place = folder / "places" / name
        place.mkdir(parents=True, exist_ok=True)
        found[name] = function(place)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    results = run_all(target)
    (target / f"{rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    # Torch's threads sometimes abort a process of a group at its very end, when all is done.
    os._exit(0)
