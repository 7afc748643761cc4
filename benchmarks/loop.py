"""What the training loop costs: a hand-written loop, Dovetail and every installed peer, side by side in one run.

All contestants train the same model on the same batches from the same seed. They take turns within each round, in an
order that changes from round to round, and every ratio is taken within its round: a machine that slows down for
a while slows all of them. The hand-written loop runs twice per round; how far its second run is from its first is the
noise of this measurement.

    python benchmarks/loop.py                      # everything, a few minutes
    python benchmarks/loop.py --workload list      # one workload
    python benchmarks/loop.py --quick --json out.json

The clock of a run starts at the first forward pass of its model, so no contestant pays for its setup, and stops when
its entry point returns. `compile.py` has the same workloads for compiled steps.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rich.console import Console
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
from dovetail.trainers.reuse import reset
from dovetail.trainers.strategies import (
    DefaultLRSchedulerStrategy,
    DefaultOptimizerStrategy,
    DefaultTrainingStepStrategy,
    GradientClippingStepStrategy,
)
from dovetail.units import Batches, Epochs
from report import Row, Section, Table, library, parser, ratios, upper_quartile, verdict

__all__ = ["WORKLOADS", "Job", "Workload", "main", "tabulate"]

SEED = 7
HAND, AGAIN = "hand-written", "hand-written, again"
OFF, DEFAULT = "dovetail, displays off", "dovetail, as a new user gets it"
STRATEGIES = "dovetail, strategies, displays off"
COMPILED = "dovetail, compiled step, displays off"
SEVERAL = "dovetail, 8 compiled steps per call, displays off"


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
    reset(trainer)
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
        job = self.prepare("dovetail" if _is_ours(contestant) else "torch", self.num_batches[quick])
        job.epochs = self.epochs
        # Dropout is to draw the same numbers, however many the model's first weights took.
        torch.manual_seed(SEED)
        return job


def _is_ours(contestant: str) -> bool:
    return contestant.startswith("dovetail")


def _mlp_from_list(loader: str, num_batches: int) -> Job:
    inputs, targets = _vectors(num_batches)
    return _mlp_job(list(zip(torch.split(inputs, 32), torch.split(targets, 32), strict=True)))


def _mlp_from_memory(loader: str, num_batches: int) -> Job:
    kind = dovetail.data.DataLoader if loader == "dovetail" else TorchDataLoader
    dataset = TensorDataset(*_vectors(num_batches))
    return _mlp_job(kind(dataset, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(SEED)))


def _mlp_from_torch(loader: str, num_batches: int) -> Job:
    return _mlp_job(TorchDataLoader(TensorDataset(*_vectors(num_batches)), batch_size=32, shuffle=True))


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
        num_batches=(250, 25),
        epochs=2,
        repeats=(15, 3),
        bars={OFF: 1.05, DEFAULT: 1.10, COMPILED: 0.30, SEVERAL: 0.20},
    ),
    Workload(
        "memory",
        "(b) the same from a dataset in memory, shuffled; the hand-written loop on torch's DataLoader",
        _mlp_from_memory,
        num_batches=(250, 25),
        epochs=2,
        repeats=(15, 3),
        bars={OFF: 0.65, DEFAULT: 0.65, COMPILED: 0.30, SEVERAL: 0.20},
    ),
    Workload(
        "cnn",
        "(c) small CNN on 28×28 images, batch 64, SGD with momentum",
        _cnn,
        num_batches=(10, 2),
        epochs=2,
        repeats=(15, 3),
        bars={OFF: 1.00, DEFAULT: 1.00, COMPILED: 0.90},
        within_noise=True,
    ),
    Workload(
        "transformer",
        "(d) transformer of 3.2 M parameters, AdamW, cosine schedule, clipping, validation",
        _transformer,
        num_batches=(10, 2),
        epochs=2,
        repeats=(7, 2),
        bars={OFF: 1.00, DEFAULT: 1.00, COMPILED: 1.00},
        within_noise=True,
    ),
    Workload(
        "torch",
        "(e) the MLP from a dataset in memory, shuffled; all on torch's own DataLoader",
        _mlp_from_torch,
        num_batches=(250, 25),
        epochs=2,
        repeats=(15, 3),
        bars={OFF: 0.65, DEFAULT: 0.65},
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
    if gap == 0:
        # The last step shows in the weights alone.
        return f"weights off by {float((result.weights - reference.weights).abs().max()):.1e}"
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


def measure(
    workload: Workload, contestants: Mapping[str, Contestant], repeats: int, quick: bool
) -> tuple[dict[str, Result], dict[str, str]]:
    """Let all contestants take turns, after one rehearsal each; say why some peers do not."""
    results, missing = {}, {}
    for name, contestant in contestants.items():
        try:
            results[name] = rehearse(contestant, workload.job(name, quick=quick))
        except Exception as error:
            if name in (HAND, AGAIN) or _is_ours(name):
                raise
            kind = "left out" if isinstance(error, NotImplementedError) else f"failed: {type(error).__name__}"
            missing[name] = f"{kind}: {str(error).partition(chr(10))[0]}"
            continue
        results[name].agreement = compare(results[name], results[HAND]) if name != HAND else "reference"
        results[name].num_steps = results[HAND].num_steps
    for number in range(repeats):
        names = list(results)
        # Everyone's neighbours change, those of the two hand-written runs too: side by side they would be too alike.
        random.Random(number).shuffle(names)
        for name in names:
            results[name].seconds.append(timed(contestants[name], workload.job(name, quick=quick)))
    return results, missing


# ------------------------------------------------------------------ reporting


def tabulate(workload: Workload, results: Mapping[str, Result], missing: Mapping[str, str]) -> Table:
    """Return the table of a workload, with the verdicts on its bars and those who took no part."""
    reference = results[HAND]
    # Three times in four the hand-written loop was no further from itself than this.
    noise = upper_quartile([abs(ratio - 1) for ratio in ratios(results[AGAIN].seconds, reference.seconds)])
    rows = []
    for name, result in results.items():
        samples = ratios(result.seconds, reference.seconds)
        bar = workload.bars.get(name)
        if bar is not None and workload.within_noise:
            bar += noise
        judged = "" if bar is None else verdict(samples, bar, noise=noise)
        cells = (f"{result.microseconds:.1f}", result.agreement)
        rows.append(Row(name, samples, bar, verdict=judged, cells=cells, is_noise=name == AGAIN))
    rows += [Row(name, verdict=reason) for name, reason in missing.items()]
    return Table(
        workload.title,
        "time over hand-written",
        rows,
        ("µs per step", "losses and weights"),
        note=f"{len(reference.seconds)} rounds of {reference.num_steps} steps; noise ±{noise:.3f}"
        + ("; the bars are 1 and this noise." if workload.within_noise else "."),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return 1 when Dovetail's losses differ from the hand-written loop's."""
    words = parser(__doc__)
    names = [workload.name for workload in WORKLOADS]
    words.add_argument("--workload", action="append", choices=names, help="only this one; may be given several times")
    words.add_argument("--repeats", type=int, help="rounds of each workload; its own number by default")
    words.add_argument("--threads", type=int, help="threads of torch; its own choice by default")
    words.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    options = words.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)

    found, missing = ({}, {}) if options.no_peers else peers.adapters()
    versions = [f"{name} {library(name)}" for name in peers.PACKAGES if library(name)]
    section = Section(
        "loop",
        "The loop",
        "The same model, batches, optimizer and seed, trained by the loop that everyone writes by hand, by Dovetail, "
        "and by every peer that is installed, each in its own usual style: the time of a run from its first forward "
        "pass to its end. *Displays off* is a library with nothing on that can be turned off; *as a new user gets it* "
        "is Dovetail with its display, its history and a look at every loss. "
        + (f"Peers: {', '.join(versions)}." if versions else "No peer is installed (`pip install '.[bench]'`)."),
        is_quick=options.quick,
    )
    contestants: dict[str, Contestant] = {
        HAND: by_hand,
        AGAIN: by_hand,
        OFF: with_dovetail_off,
        DEFAULT: with_dovetail,
        STRATEGIES: with_strategies,
        **found,
    }
    agree = True
    for workload in WORKLOADS:
        if options.workload and workload.name not in options.workload:
            continue
        results, absent = measure(
            workload, contestants, options.repeats or workload.repeats[options.quick], options.quick
        )
        section.add(tabulate(workload, results, absent | missing))
        agree &= all(results[name].agreement == "bit for bit" for name in (OFF, DEFAULT, STRATEGIES))
    section.save(options)
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
