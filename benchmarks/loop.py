"""What the training loop costs: a hand-written loop, Dovetail and every installed peer, side by side in one run.

All contestants train the same model on the same batches from the same seed. They take turns within each round, in an
order that changes from round to round, and every ratio is taken within its round: a machine that slows down for
a while slows all of them. The hand-written loop runs twice per round; how far its second run is from its first is the
noise of this measurement.

    python benchmarks/loop.py                      # everything, a few minutes
    python benchmarks/loop.py --workload list      # one workload
    python benchmarks/loop.py --quick --json out.json

The clock of a run starts at the first forward pass of its model, so no contestant pays for its setup, and stops when
its entry point returns. The compiled trainer has made its graph before its clock starts, at the first epoch; its
losses are not bit for bit those of the hand-written loop, because a compiler sums in another order.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import dovetail.data
import peers
from dovetail.callbacks import Callback, ProgressDisplay
from dovetail.trainers import CompiledTrainer, Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import (
    DefaultLRSchedulerStrategy,
    DefaultOptimizerStrategy,
    DefaultTrainingStepStrategy,
    GradientClippingStepStrategy,
)
from dovetail.units import Batches, Epochs

__all__ = ["Job", "Workload", "main"]

SEED = 7
HAND, AGAIN = "hand-written", "hand-written, again"
OFF, DEFAULT = "dovetail, displays off", "dovetail, as a new user gets it"
STRATEGIES = "dovetail, strategies, displays off"
COMPILED = "dovetail, compiled step, displays off"
SEVERAL = "dovetail, 8 compiled steps per call, displays off"
OURS = (OFF, DEFAULT, STRATEGIES, COMPILED, SEVERAL)


@dataclass
class Job:
    """One run: all that a contestant trains, made anew for it.

    Attributes:
        model: In training mode.
        criterion: The loss, a mean over the batch.
        optimizer: Steps after every batch.
        scheduler: Steps after every optimizer step, if there is one.
        train: The training batches, iterated once per epoch.
        valid: The validation batches after every epoch; None for no validation.
        epochs: How often to iterate over the training batches.
        clip: The largest norm of the gradients; 0 clips nothing.
        start: Starts the clock, for a contestant that prepares itself before.
        losses: Those of training, from a contestant that prepares itself.
    """

    model: nn.Module
    criterion: nn.Module
    optimizer: Optimizer
    train: Iterable[Any]
    epochs: int
    scheduler: LRScheduler | None = None
    valid: list[Any] | None = None
    clip: float = 0.0
    start: Callable[[], None] = lambda: None
    losses: list[float] = field(default_factory=list)


Contestant = Callable[[Job], None]


def by_hand(job: Job) -> None:
    """Train with the loop that everyone writes."""
    model, criterion, optimizer, scheduler = job.model, job.criterion, job.optimizer, job.scheduler
    for _ in range(job.epochs):
        for inputs, targets in job.train:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            if job.clip:
                nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        if job.valid is not None:
            _validate_by_hand(job, job.valid)


def _validate_by_hand(job: Job, batches: list[Any]) -> tuple[float, float]:
    job.model.eval()
    total, num_right, num_samples = 0.0, 0.0, 0
    with torch.no_grad():
        for inputs, targets in batches:
            outputs = job.model(inputs)
            total += job.criterion(outputs, targets).item() * len(targets)
            num_right += (outputs.argmax(dim=1) == targets).float().mean().item() * len(targets)
            num_samples += len(targets)
    job.model.train()
    return total / num_samples, num_right / num_samples


def with_dovetail_off(job: Job) -> None:
    """Train with nothing on that a user could turn off."""
    _with_dovetail(job, nonfinite="ignore")


def with_dovetail(job: Job) -> None:
    """Train as a new user does at a terminal: display, history, and a look at every loss."""
    with open(os.devnull, "w") as nowhere:
        display = ProgressDisplay(console=Console(file=nowhere, force_terminal=True, width=120))
        _with_dovetail(job, callbacks=[display])


def with_compiled(job: Job) -> None:
    """Train with one graph for the whole step, made before the clock starts."""
    _with_graph(job, steps_per_call=1)


def with_several(job: Job) -> None:
    """Train with one graph for eight whole steps, made before the clock starts."""
    _with_graph(job, steps_per_call=8)


def _with_graph(job: Job, steps_per_call: int) -> None:
    plain = _trainer(job, nonfinite="ignore", callbacks=[_StartClock(job)])
    trainer = CompiledTrainer(plain, steps_per_call=steps_per_call)
    pieces = (job.model, job.optimizer, *([] if job.scheduler is None else [job.scheduler]))
    before = [copy.deepcopy(piece.state_dict()) for piece in pieces]
    # A single step, and then a whole call.
    trainer.fit(job.train, max_length=Batches(1 + steps_per_call))
    for piece, state in zip(pieces, before, strict=True):
        piece.load_state_dict(state)
    trainer.reset()
    if isinstance(job.train, dovetail.data.DataLoader):
        job.train.generator.manual_seed(SEED)
    torch.manual_seed(SEED)
    trainer.fit(job.train, job.valid, max_length=Epochs(job.epochs))
    job.losses = list(trainer.history.losses)


class _StartClock(Callback):
    """Starts the clock of a job when a run starts: that of the warm-up, and then anew that of the run that counts."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_start(self, context: Any) -> None:
        self.job.start()


def _with_dovetail(job: Job, **settings: Any) -> None:
    trainer = _trainer(job, **settings)
    trainer.fit(job.train, job.valid, max_length=Epochs(job.epochs))


def _trainer(job: Job, **settings: Any) -> Trainer:
    return Trainer(
        job.model,
        "cpu",
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        criterion=job.criterion,
        scheduler_step_on_batch=True,
        gradient_clip=job.clip,
        verbose=False,
        **settings,
    )


def with_strategies(job: Job) -> None:
    """Train with a strategy for every concern, and nothing else on."""
    scheduler, optimizer, clip = job.scheduler, job.optimizer, job.clip
    step = GradientClippingStepStrategy(clip) if clip else DefaultTrainingStepStrategy()
    trainer = ComposableTrainer(
        job.model,
        loss_strategy=job.criterion,
        optimizer_strategy=DefaultOptimizerStrategy(lambda model: optimizer),
        training_step_strategy=step,
        lr_scheduler_strategy=DefaultLRSchedulerStrategy(lambda optimizer: scheduler, interval="update"),
        device="cpu",
        nonfinite="ignore",
        verbose=False,
    )
    trainer.fit(job.train, job.valid, max_length=Epochs(job.epochs))


# ------------------------------------------------------------------ workloads


@dataclass(frozen=True)
class Workload:
    """What is trained, and how fast that must be.

    Attributes:
        name: For the command line.
        title: For the table.
        prepare: Makes a job; told whose loader it is for and how many batches an epoch has.
        num_batches: Batches of an epoch, and those of a quick one.
        epochs: Epochs of a run.
        repeats: Rounds, and those of a quick run.
        bars: The largest ratio to the hand-written loop that a contestant may have.
        within_noise: Whether a bar may be exceeded by the noise of the run.
    """

    name: str
    title: str
    prepare: Callable[[Literal["torch", "dovetail"], int], Job]
    num_batches: tuple[int, int]
    epochs: int
    repeats: tuple[int, int]
    bars: dict[str, float]
    within_noise: bool = False

    def job(self, contestant: str, *, quick: bool) -> Job:
        """Make a new job from the one seed."""
        torch.manual_seed(SEED)
        job = self.prepare("dovetail" if contestant in OURS else "torch", self.num_batches[quick])
        job.epochs = self.epochs
        # Dropout is to draw the same numbers, however many the model's first weights took.
        torch.manual_seed(SEED)
        return job


def _mlp_from_list(loader: str, num_batches: int) -> Job:
    inputs, targets = _vectors(num_batches)
    return _mlp_job(list(zip(torch.split(inputs, 32), torch.split(targets, 32), strict=True)))


def _mlp_from_memory(loader: str, num_batches: int) -> Job:
    kind = dovetail.data.DataLoader if loader == "dovetail" else TorchDataLoader
    dataset = TensorDataset(*_vectors(num_batches))
    return _mlp_job(kind(dataset, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(SEED)))


def _mlp_job(batches: Iterable[Any]) -> Job:
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    return Job(model, nn.CrossEntropyLoss(), SGD(model.parameters(), lr=0.1), batches, 1)


def _vectors(num_batches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    size = 32 * num_batches
    return torch.randn(size, 10, generator=generator), torch.randint(10, (size,), generator=generator)


def _cnn(loader: str, num_batches: int) -> Job:
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(64 * num_batches, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (64 * num_batches,), generator=generator)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )
    batches = list(zip(torch.split(images, 64), torch.split(labels, 64), strict=True))
    return Job(model, nn.CrossEntropyLoss(), SGD(model.parameters(), lr=0.05, momentum=0.9), batches, 1)


class Transformer(nn.Module):
    """A decoder of 3.2 million parameters that predicts the next of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 256)
        self.places = nn.Parameter(torch.zeros(32, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 64)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(tokens) + self.places, mask=self.mask, is_causal=True)
        # Classes are the second dimension, where cross entropy looks for them.
        logits: Tensor = self.head(hidden).transpose(1, 2)
        return logits


def _transformer(loader: str, num_batches: int) -> Job:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(64, (num_batches + 2, 8, 33), generator=generator)
    batches = [(sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()) for sequence in tokens]
    model = Transformer()
    optimizer = AdamW(model.parameters(), lr=3e-4)
    return Job(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        batches[:num_batches],
        1,
        scheduler=CosineAnnealingLR(optimizer, T_max=2 * num_batches),
        valid=batches[num_batches:],
        clip=1.0,
    )


WORKLOADS = (
    Workload(
        "list",
        "(a) two-layer MLP of width 10, batch 32, SGD, batches in a list",
        _mlp_from_list,
        num_batches=(1000, 100),
        epochs=2,
        repeats=(21, 7),
        bars={OFF: 1.05, DEFAULT: 1.10, COMPILED: 0.30, SEVERAL: 0.20},
    ),
    Workload(
        "memory",
        "(b) the same from a dataset in memory, shuffled; the hand-written loop on torch's DataLoader",
        _mlp_from_memory,
        num_batches=(1000, 100),
        epochs=2,
        repeats=(21, 5),
        bars={OFF: 0.65, DEFAULT: 0.65, COMPILED: 0.30, SEVERAL: 0.20},
    ),
    Workload(
        "cnn",
        "(c) small CNN on 28×28 images, batch 64, SGD with momentum",
        _cnn,
        num_batches=(10, 5),
        epochs=2,
        repeats=(25, 5),
        bars={OFF: 1.00, DEFAULT: 1.00, COMPILED: 0.90},
        within_noise=True,
    ),
    Workload(
        "transformer",
        "(d) transformer of 3.2 M parameters, AdamW, cosine schedule, clipping, validation",
        _transformer,
        num_batches=(10, 3),
        epochs=2,
        repeats=(9, 3),
        bars={OFF: 1.00, DEFAULT: 1.00},
        within_noise=True,
    ),
)


# ------------------------------------------------------------------ measuring


class _Recording(nn.Module):
    """A criterion that keeps every loss of training."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion
        self.losses: list[Tensor] = []

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.criterion(outputs, targets)
        if loss.requires_grad:
            self.losses.append(loss.detach())
        return loss


@dataclass
class Result:
    """What was found out about one contestant on one workload.

    Attributes:
        seconds: Of every round.
        num_steps: Training steps of a round.
        losses: Of a run that was not timed.
        weights: All of them after that run, one after the other.
        agreement: How the losses and weights compare with those of the hand-written loop.
    """

    seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    losses: list[float] = field(default_factory=list)
    weights: Tensor | None = None
    agreement: str = "reference"

    @property
    def microseconds(self) -> float:
        """Per step, the median of all rounds."""
        return statistics.median(self.seconds) / self.num_steps * 1e6

    def ratios(self, reference: Result) -> list[float]:
        """The time over that of the reference, round by round."""
        return [mine / its for mine, its in zip(self.seconds, reference.seconds, strict=True)]


_GRAPHS = (with_compiled, with_several)


def rehearse(contestant: Contestant, job: Job) -> Result:
    """Run once without a clock, to warm up and to see every loss."""
    recording = _Recording(job.criterion)
    if contestant not in _GRAPHS:
        # A graph would append no loss.
        job.criterion = recording
    contestant(job)
    weights = torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()])
    losses = torch.stack(recording.losses).tolist() if recording.losses else job.losses
    return Result(num_steps=len(losses), losses=losses, weights=weights)


def compare(result: Result, reference: Result) -> str:
    """Say how the numbers of two runs differ, if they do."""
    assert result.weights is not None
    assert reference.weights is not None
    if len(result.losses) != len(reference.losses):
        return f"{len(result.losses)} steps"
    if result.losses == reference.losses and torch.equal(result.weights, reference.weights):
        return "bit for bit"
    gap = max(abs(mine - its) for mine, its in zip(result.losses, reference.losses, strict=True))
    return f"off by {gap:.1e}"


def timed(contestant: Contestant, job: Job) -> float:
    """Return the seconds from the first forward pass of a run to its end."""
    start = 0.0

    def note_start(*forward: Any) -> None:
        nonlocal start
        if handle is not None:
            handle.remove()
        start = time.perf_counter()

    # A module with a hook is not compiled.
    handle = None if contestant in _GRAPHS else job.model.register_forward_pre_hook(note_start)
    job.start = note_start
    # As timeit does: when garbage is collected depends on who ran before.
    gc.collect()
    gc.disable()
    try:
        contestant(job)
        return time.perf_counter() - start
    finally:
        gc.enable()


def measure(workload: Workload, contestants: dict[str, Contestant], repeats: int, quick: bool) -> dict[str, Result]:
    """Let all contestants take turns, after one rehearsal each."""
    results = {}
    for name, contestant in contestants.items():
        try:
            results[name] = rehearse(contestant, workload.job(name, quick=quick))
        except Exception as error:
            if name in (HAND, AGAIN, *OURS):
                raise
            reason = str(error).partition("\n")[0]
            print(f"{name} is left out of {workload.name}: {type(error).__name__}: {reason}", file=sys.stderr)
            continue
        results[name].agreement = compare(results[name], results[HAND]) if name != HAND else "reference"
        results[name].num_steps = results[HAND].num_steps
    for number in range(repeats):
        names = list(results)
        # Everyone's neighbours change, those of the two hand-written runs too: side by side they would be too alike.
        random.Random(number).shuffle(names)
        for name in names:
            results[name].seconds.append(timed(contestants[name], workload.job(name, quick=quick)))
    return results


# ------------------------------------------------------------------ reporting


def summarise(workload: Workload, results: dict[str, Result]) -> dict[str, Any]:
    """Return all numbers of a workload by name, the verdicts on the bars among them."""
    reference = results[HAND]
    # Three times in four the hand-written loop was no further from itself than this.
    noise = _upper_quartile([abs(ratio - 1) for ratio in results[AGAIN].ratios(reference)])
    rows = []
    for name, result in results.items():
        ratios = result.ratios(reference)
        ratio, bar = statistics.median(ratios), workload.bars.get(name)
        rows.append(
            {
                "contestant": name,
                "microseconds_per_step": result.microseconds,
                "ratio": ratio,
                "spread": _spread(ratios),
                "bar": bar,
                "verdict": None if bar is None else _verdict(ratio, bar, noise, within_noise=workload.within_noise),
                "agreement": result.agreement,
                "seconds": result.seconds,
            }
        )
    return {
        "workload": workload.name,
        "title": workload.title,
        "num_steps": reference.num_steps,
        "repeats": len(reference.seconds),
        "noise": noise,
        "rows": rows,
    }


def _verdict(ratio: float, bar: float, noise: float, *, within_noise: bool) -> str:
    if noise > 0.05 and abs(ratio - bar) <= noise * max(ratio, bar):
        # A busy machine: neither a pass nor a failure would mean anything.
        return "unclear"
    return "ok" if ratio <= bar + (noise if within_noise else 0.0) else "over"


def _spread(ratios: list[float]) -> float:
    """Three times in four a ratio was no further from the median than this; slow moments do not stretch it."""
    middle = statistics.median(ratios)
    return _upper_quartile([abs(ratio - middle) for ratio in ratios])


def _upper_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[2] if len(values) > 1 else values[0]


def show(summary: dict[str, Any], console: Console) -> None:
    table = Table(title=summary["title"], title_justify="left", caption_justify="left")
    table.caption = f"{summary['repeats']} rounds of {summary['num_steps']} steps; noise ±{summary['noise']:.3f}"
    table.add_column("contestant")
    for heading in ("µs/step", "ratio", "±", "bar"):
        table.add_column(heading, justify="right")
    table.add_column("")
    table.add_column("losses, weights")
    for row in summary["rows"]:
        table.add_row(
            row["contestant"],
            f"{row['microseconds_per_step']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['spread']:.3f}",
            "" if row["bar"] is None else f"≤ {row['bar']:.2f}",
            row["verdict"] or "",
            row["agreement"],
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return 1 when Dovetail's losses differ from the hand-written loop's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workload", action="append", choices=names, help="only this one; may be given several times")
    parser.add_argument("--repeats", type=int, help="rounds of each workload; its own number by default")
    parser.add_argument("--quick", action="store_true", help="short epochs and few rounds: to see that it works")
    parser.add_argument("--threads", type=int, help="threads of torch; its own choice by default")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)

    contestants: dict[str, Contestant] = {
        HAND: by_hand,
        AGAIN: by_hand,
        OFF: with_dovetail_off,
        DEFAULT: with_dovetail,
        STRATEGIES: with_strategies,
        COMPILED: with_compiled,
        SEVERAL: with_several,
    }
    found: dict[str, Contestant] = {} if options.no_peers else peers.installed()
    console = Console(width=120)
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    console.print(f"{machine}; peers: {', '.join(found) or 'none'}", highlight=False)

    summaries = []
    for workload in WORKLOADS:
        if options.workload and workload.name not in options.workload:
            continue
        repeats = options.repeats or workload.repeats[options.quick]
        # Several steps per call are for tiny steps.
        taking_part = {name: it for name, it in contestants.items() if name != SEVERAL or name in workload.bars}
        summaries.append(summarise(workload, measure(workload, taking_part | found, repeats, options.quick)))
        show(summaries[-1], console)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "workloads": summaries}, indent=2) + "\n")
    bit_equal = {OFF, DEFAULT, STRATEGIES}
    ours = [row for summary in summaries for row in summary["rows"] if row["contestant"] in bit_equal]
    return int(any(row["agreement"] != "bit for bit" for row in ours))


if __name__ == "__main__":
    sys.exit(main())
