"""What a federation costs: a lean hand-written loop, Dovetail's backends and trainers, and installed peers, in one run.

All contestants train the same model on the same clients from the same weights, round by round. They take turns within
each round, in an order that changes from round to round, and every ratio is taken within its round: a machine that
slows down for a while slows all of them. The hand-written loop runs twice per round; how far its second run is from
its first is the noise of this measurement. Peers come after that, in rounds of their own, with whom they are compared
with: Flower's simulation brings a Ray cluster, which has something to do also when it is not its turn. So peers sleep
then.

    python benchmarks/federated.py                                  # everything, some minutes
    python benchmarks/federated.py --workload synthetic --quick
    python benchmarks/federated.py --pfl-python pfl/bin/python --flower-python flower/bin/python

The clock of a round starts with the weights and the numbers of ten clients, and stops when the next weights are there.
Peers shut down after the last round, when the clock has stopped.
Workers are started, and graphs are compiled, in rounds before that. Peers need environments of their own, since their
requirements clash with ours (pfl wants an old attrs, Flower's simulation one version of Ray):

    python -m venv pfl && pfl/bin/pip install torch==2.13.0 pfl
    python -m venv flower && flower/bin/pip install torch==2.13.0 'flwr[simulation]'

Each runs in the Python that is given for it, on data from a file; one without is named as not installed.

The hand-written loop is lean: parameters are reset in place, the optimizer's state is cleared, nothing is constructed
per client, and the order of the samples is drawn before the clock starts. What Dovetail does in one process has its
bits. What does not agree is named in the last column.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dovetail.algorithms import FedAvg
from dovetail.clients.simple import Client
from dovetail.data import DataLoader
from dovetail.data.models import cnn, logistic, mlp
from dovetail.errors import DataError
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.backends import Backend, Done, backends
from dovetail.federated.data.partition import dirichlet
from dovetail.federated.data.sources import Datasource, PartitionedData, leaf_synthetic
from dovetail.federated.messages import Task, Update
from dovetail.runtime.seeds import derive_seed
from dovetail.runtime.signals import install_handlers_once
from dovetail.trainers import CompiledTrainer
from dovetail.trainers.base import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy, ShuffleDataLoaderStrategy
from report import Row, Section, Table, parser, ratios, upper_quartile, verdict

__all__ = ["Workload", "main"]

SEED = 7
_SECONDS_TO_SHUT_DOWN = 60
NUM_CLIENTS, PER_ROUND = 100, 10
HAND, AGAIN = "hand-written", "hand-written, again"
SEQUENTIAL = "sequential"
COMPILED, SEVERAL = "sequential, compiled step", "sequential, 8 compiled steps per call"
PROCESS = "process, 2 workers"
BOTH = "process, 2 workers, compiled step"
BOTH_SEVERAL = "process, 2 workers, 8 compiled steps per call"
PEERS = PFL, FLOWER = "pfl", "Flower's simulation"
# What two cores of this machine give at most: nothing is sent, shared or waited for but the end of a round.
TWO_HANDS = "hand-written, in two processes that share nothing"

Weights = dict[str, Tensor]
# Given a round, return its clients' weights made one.
Round = Callable[[int, Weights], Weights]


@dataclass(frozen=True)
class Workload:
    """What a federation trains, and how fast that must be.

    Attributes:
        name: For the command line.
        title: For the table.
        data: Makes the clients' data.
        model: Makes the model.
        epochs: Local epochs.
        batch_size: Samples in a batch.
        lr: The learning rate of plain SGD.
        repeats: Rounds that are measured, and those of a quick run.
        bars: By contestant, whom it is compared with, in which sense, and the number that is asked for.
        is_tiny: Whether a step is so small that several are made by one call of a graph.
    """

    name: str
    title: str
    data: Callable[[], Datasource]
    model: Callable[[], nn.Module]
    epochs: int
    batch_size: int
    lr: float
    repeats: tuple[int, int]
    bars: Mapping[str, tuple[str, str, float]]
    is_tiny: bool = False


class Federation:
    """A workload with everything that all contestants share."""

    def __init__(self, workload: Workload, rounds: int) -> None:
        self.workload = workload
        self.data = workload.data()
        torch.manual_seed(SEED)
        self.model = workload.model()
        self.first = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        draw = random.Random(SEED)
        self.chosen = [draw.sample(range(1, NUM_CLIENTS + 1), PER_ROUND) for _ in range(rounds)]

    @property
    def config(self) -> dict[str, Any]:
        """What a task tells the client's trainer."""
        return {"epochs": self.workload.epochs, "batch_size": self.workload.batch_size}

    def num_steps(self, number: int) -> int:
        """The steps of a round."""
        size, epochs = self.workload.batch_size, self.workload.epochs
        return sum(-(-self.data.num_samples(it) // size) * epochs for it in self.chosen[number])

    def order(self, number: int, client_id: int) -> list[list[Tensor]]:
        """The samples of every batch of every epoch of a client in a round, as Dovetail draws them."""
        numbers = torch.utils.data.TensorDataset(torch.arange(self.data.num_samples(client_id)))
        loader = DataLoader(
            numbers,
            self.workload.batch_size,
            shuffle=True,
            seed=derive_seed(derive_seed(SEED, number, client_id), "order"),
        )
        return [[batch for (batch,) in loader] for _ in range(self.workload.epochs)]


# ------------------------------------------------------------------ contestants


class ByHand:
    """The lean loop: nothing is made per client but its difference."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.model = copy.deepcopy(federation.model)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = SGD(self.model.parameters(), lr=federation.workload.lr)
        self.state = self.model.state_dict()
        self.orders: dict[int, list[list[list[Tensor]]]] = {}

    def prepare(self, number: int) -> None:
        """Draw the orders, before the clock starts."""
        chosen = self.federation.chosen[number]
        self.orders = {number: [self.federation.order(number, client_id) for client_id in chosen]}

    def __call__(self, number: int, weights: Weights) -> Weights:
        """Train the clients of a round, and return the mean of their models by samples."""
        federation, model, criterion, optimizer = self.federation, self.model, self.criterion, self.optimizer
        updates = []
        for client_id, epochs in zip(federation.chosen[number], self.orders[number], strict=True):
            inputs, targets = federation.data.train_data(client_id)
            with torch.no_grad():
                for name, value in weights.items():
                    self.state[name].copy_(value)
            optimizer.state.clear()
            for batches in epochs:
                for indices in batches:
                    optimizer.zero_grad()
                    loss = criterion(model(inputs[indices]), targets[indices])
                    loss.backward()
                    optimizer.step()
            delta = {name: value - weights[name] for name, value in self.state.items()}
            updates.append(Update(client_id, number, len(inputs), delta=delta))
        return FedAvg().aggregate(weights, updates, weighted_mean)


class WithDovetail:
    """A client of Dovetail's on one of its backends, asked as a server asks it."""

    def __init__(
        self, federation: Federation, backend: str, compiled: bool = False, steps_per_call: int = 1, workers: int = 1
    ) -> None:
        self.federation = federation
        plain = ComposableTrainer(
            optimizer_strategy=SGDOptimizerStrategy(lr=federation.workload.lr),
            data_loader_strategy=ShuffleDataLoaderStrategy(),
            device="cpu",
            verbose=False,
        )
        trainer: Trainer = CompiledTrainer(plain, mode="step", steps_per_call=steps_per_call) if compiled else plain
        self.algorithm = FedAvg()
        self.client = Client(trainer=trainer)
        self.client.prepare(federation.model, federation.data, self.algorithm)
        self.backend: Backend = backends.get(backend)(num_workers=workers)
        self.backend.start(self.client)

    def __call__(self, number: int, weights: Weights) -> Weights:
        """Ask the clients of a round, and aggregate."""
        federation = self.federation
        tasks = [
            Task(number, it, weights, seed=derive_seed(SEED, number, it), config=federation.config)
            for it in federation.chosen[number]
        ]
        answers: dict[int, Update] = {}
        # As a server does, for all its rounds.
        with install_handlers_once():
            for outcome in self.backend.run([(task, {}) for task in tasks]):
                if not isinstance(outcome, Done):
                    raise RuntimeError(f"client {outcome.client_id}: {outcome.reason}")
                answers[outcome.update.client_id] = outcome.update
        updates = [answers[it] for it in federation.chosen[number]]
        return self.algorithm.aggregate(weights, updates, weighted_mean)

    def close(self) -> None:
        """End the workers."""
        self.backend.close()


class Peer:
    """A library in a Python of its own, which does one round for every line that it reads."""

    def __init__(self, federation: Federation, name: str, python: str, folder: Path) -> None:
        workload, chosen = federation.workload, federation.chosen
        path = folder / f"{workload.name}.pt"
        if not path.exists():
            ids = sorted({it for round_ in chosen for it in round_})
            torch.save(
                {
                    "data": {it: federation.data.train_data(it) for it in ids},
                    "model": workload.name,
                    "weights": federation.first,
                    "chosen": chosen,
                    "epochs": workload.epochs,
                    "batch_size": workload.batch_size,
                    "lr": workload.lr,
                },
                path,
            )
        script = Path(__file__).with_name("federated_peers.py")
        command = [python, str(script), name, str(path)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "PYTHONPATH": str(script.parent),
        }
        self.seconds_to_start = 0.0
        self._log = (folder / f"{name}-{workload.name}.log").open("w+")
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        self._hear("ready")
        self.seconds_to_start = time.perf_counter() - started

    def __call__(self, number: int, weights: Weights) -> Weights:
        """Let the peer do a round; its weights are its own."""
        self.begin()
        self.end()
        return weights

    def begin(self) -> None:
        """Ask for a round."""
        assert self._process.stdin is not None
        try:
            print("round", file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(self._last_words()) from None

    def end(self) -> None:
        """Wait for its end."""
        self._hear("done")

    def sleep(self) -> None:
        """Let it do nothing, with all processes that it has started."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Let it shut down, and kill it with all its processes if that takes longer than a minute."""
        self.wake()
        assert self._process.stdin is not None
        # A peer that has failed no longer reads its input.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_SHUT_DOWN)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def _hear(self, word: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise RuntimeError(self._last_words())

    def _last_words(self) -> str:
        self._log.seek(0)
        last = [line for line in self._log.read().splitlines() if line.strip()][-1:]
        return last[0][:120] if last else "it ended without a word"


class TwoHands:
    """The lean loop in two bare processes, each with half of the samples."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self._halves = [Peer(federation, name, sys.executable, folder) for name in ("hand-1", "hand-2")]

    def __call__(self, number: int, weights: Weights) -> Weights:
        """Let both do their halves of a round; nothing comes back."""
        for half in self._halves:
            half.begin()
        for half in self._halves:
            half.end()
        return weights

    def close(self) -> None:
        """End both."""
        for half in self._halves:
            half.close()


# ------------------------------------------------------------------ workloads


def _synthetic() -> Datasource:
    # Kept: what is measured is training, not the making of random numbers.
    made = leaf_synthetic(1.0, 1.0, NUM_CLIENTS, SEED)
    return _Kept([made.train_data(client_id) for client_id in range(1, NUM_CLIENTS + 1)])


class _Kept(Datasource):
    knows_sizes = True

    def __init__(self, data: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.num_clients = len(data)
        self._data = list(data)

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        return self._data[client_id - 1]


def _images() -> Datasource:
    inputs, labels = _fashion()
    cut = PartitionedData((inputs, labels), dirichlet(labels, NUM_CLIENTS, alpha=0.3, seed=SEED))
    return _Kept([cut.train_data(client_id) for client_id in range(1, NUM_CLIENTS + 1)])


def _fashion() -> tuple[Tensor, Tensor]:
    from dovetail.data.datasets import fashion_mnist

    try:
        inputs, labels = fashion_mnist()[0].tensors
    except DataError as error:
        print(f"RANDOM IMAGES in place of Fashion-MNIST: {error}", file=sys.stderr)
        generator = torch.Generator().manual_seed(SEED)
        return torch.rand(60_000, 1, 28, 28, generator=generator), torch.randint(10, (60_000,), generator=generator)
    return inputs.reshape(-1, 1, 28, 28), labels


_ALL = {SEQUENTIAL: (HAND, "at most", 1.05), PFL: (SEQUENTIAL, "at least", 1.0)}
_IMAGES = {**_ALL, PROCESS: (SEQUENTIAL, "faster", 1.8), FLOWER: (PROCESS, "at least", 4.0)}

WORKLOADS = (
    Workload(
        "synthetic",
        "F1: logistic regression, Synthetic(1, 1), 100 clients of power-law sizes, 10 a round, 20 epochs, batch 10",
        _synthetic,
        logistic,
        epochs=20,
        batch_size=10,
        lr=0.01,
        repeats=(7, 2),
        bars={**_ALL, SEVERAL: (SEQUENTIAL, "faster", 3.0)},
        is_tiny=True,
    ),
    Workload(
        "mlp",
        "F2: MLP 784-120-10, Fashion-MNIST, 100 clients by Dirichlet(0.3), 10 a round, 1 epoch, batch 32",
        _images,
        lambda: mlp(784, 10, (120,)),
        epochs=1,
        batch_size=32,
        lr=0.05,
        repeats=(31, 2),
        bars={**_IMAGES, COMPILED: (SEQUENTIAL, "faster", 3.0), BOTH: (SEQUENTIAL, "faster", 3.0)},
    ),
    Workload(
        "cnn",
        "F2: small CNN, Fashion-MNIST, 100 clients by Dirichlet(0.3), 10 a round, 1 epoch, batch 32",
        _images,
        cnn,
        epochs=1,
        batch_size=32,
        lr=0.05,
        repeats=(7, 2),
        bars=_IMAGES,
    ),
)


# ------------------------------------------------------------------ measuring


@dataclass
class Result:
    """What was found out about one contestant on one workload.

    Attributes:
        seconds: Of every round.
        gap: How far its weights are from those of the hand-written loop after a round from the same ones, at most; None
            for a peer.
    """

    seconds: list[float] = field(default_factory=list)
    gap: float | None = None


def contestants(federation: Federation, folder: Path) -> dict[str, Round]:
    """Return who takes part besides peers, ready for a first round."""
    tiny = federation.workload.is_tiny
    made = references(federation)
    made[COMPILED] = WithDovetail(federation, "sequential", compiled=True)
    if tiny:
        made[SEVERAL] = WithDovetail(federation, "sequential", compiled=True, steps_per_call=8)
        made[BOTH_SEVERAL] = WithDovetail(federation, "process", compiled=True, steps_per_call=8, workers=2)
    else:
        made[BOTH] = WithDovetail(federation, "process", compiled=True, workers=2)
    made[TWO_HANDS] = TwoHands(federation, folder)
    return made


def references(federation: Federation) -> dict[str, Round]:
    """Return with whom others are compared."""
    return {
        HAND: ByHand(federation),
        AGAIN: ByHand(federation),
        SEQUENTIAL: WithDovetail(federation, "sequential"),
        PROCESS: WithDovetail(federation, "process", workers=2),
    }


def peers(federation: Federation, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Round], dict[str, str]]:
    """Return the peers that are installed, ready for a first round, and why the others do not take part."""
    made: dict[str, Round] = {}
    missing = {}
    for name, kind, python in ((PFL, "pfl", options.pfl_python), (FLOWER, "flower", options.flower_python)):
        if python is None:
            missing[name] = f"not installed: no --{kind}-python is given"
            continue
        try:
            made[name] = Peer(federation, kind, python, folder)
        except (OSError, RuntimeError) as error:
            missing[name] = f"failed: {error}"
    return made, missing


def measure(
    federation: Federation, rounds: Mapping[str, Round], repeats: int, warm_up: int
) -> tuple[dict[str, Result], dict[str, str]]:
    """Let all contestants take turns, after rounds in which they warm up; say which peers have failed, and how."""
    try:
        return _measure(federation, rounds, repeats, warm_up)
    finally:
        for contestant in rounds.values():
            if isinstance(contestant, (WithDovetail, Peer, TwoHands)):
                contestant.close()


def _measure(
    federation: Federation, rounds: Mapping[str, Round], repeats: int, warm_up: int
) -> tuple[dict[str, Result], dict[str, str]]:
    results = {name: Result() for name in rounds}
    failed: dict[str, str] = {}
    weights = dict(federation.first)
    for number in range(warm_up + repeats):
        names = list(results)
        random.Random(number).shuffle(names)
        after: dict[str, Weights] = {}
        for name in names:
            contestant = rounds[name]
            if isinstance(contestant, ByHand):
                contestant.prepare(number)
            elif isinstance(contestant, Peer):
                contestant.wake()
            # As timeit does: when garbage is collected depends on who ran before.
            gc.collect()
            gc.disable()
            started = time.perf_counter()
            try:
                after[name] = contestant(number, weights)
            except RuntimeError as error:
                if not isinstance(contestant, Peer):
                    raise
                del results[name]
                failed[name] = f"failed in round {number + 1}: {error}"
                continue
            finally:
                seconds = time.perf_counter() - started
                gc.enable()
                if isinstance(contestant, Peer):
                    contestant.sleep()
            if number >= warm_up:
                results[name].seconds.append(seconds)
        # All of them begin the next round where the hand-written loop has ended: who rounds differently once would be
        # on another way after many rounds, on which nothing can be compared.
        weights = after[HAND]
        for name, result in results.items():
            if not isinstance(rounds[name], (Peer, TwoHands)):
                gap = max(float((after[name][it] - weights[it]).abs().max()) for it in weights)
                result.gap = max(result.gap or 0.0, gap)
    return results, failed


def around_a_client(repeats: int) -> tuple[list[float], int]:
    """Return what a client costs beyond its steps, for a model of 100,000 parameters: milliseconds and Python calls."""
    data = [(torch.randn(32, 784), torch.randint(10, (32,)))] * NUM_CLIENTS
    workload = Workload("", "", lambda: _Kept(data), lambda: mlp(784, 10, (120,)), 1, 32, 0.05, (1, 1), {})
    federation = Federation(workload, 1)
    ours = WithDovetail(federation, "sequential")
    by_hand = ByHand(federation)
    inputs, targets = data[0]

    def client() -> None:
        ours.client.work(Task(1, 1, federation.first, seed=SEED, config=federation.config), {})

    def step() -> None:
        by_hand.optimizer.zero_grad()
        by_hand.criterion(by_hand.model(inputs), targets).backward()
        by_hand.optimizer.step()

    def seconds(run: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(20):
            run()
        return (time.perf_counter() - started) / 20

    for run in (client, step):
        seconds(run)
    extra = [1e3 * (seconds(client) - seconds(step)) for _ in range(repeats)]
    return extra, _calls(client) - _calls(step)


def _calls(run: Callable[[], None]) -> int:
    number = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return number


# ------------------------------------------------------------------ reporting


def noise_of(results: Mapping[str, Result]) -> float:
    """Return how far the hand-written loop is from itself, three times in four."""
    return upper_quartile([abs(ratio - 1) for ratio in ratios(results[AGAIN].seconds, results[HAND].seconds)])


def tabulate(
    federation: Federation,
    results: Mapping[str, Result],
    beside: Mapping[str, Result],
    missing: Mapping[str, str],
    warm_up: int,
) -> Table:
    """Return the table of a workload, from the rounds without peers and from those with them."""
    reference = results[HAND].seconds
    rows = []
    for name, result in [*results.items(), *((name, beside[name]) for name in PEERS if name in beside)]:
        own = beside if name in PEERS else results
        speedup = statistics.median(ratios(own[SEQUENTIAL].seconds, result.seconds))
        gap = result.gap
        agreement = "" if gap is None else "bit for bit" if gap == 0 else f"off by {gap:.1e}"
        cells = (f"{statistics.median(result.seconds) * 1e3:.1f}", f"{speedup:.2f}", agreement)
        rows.append(Row(_shown(name), ratios(result.seconds, own[HAND].seconds), cells=cells, is_noise=name == AGAIN))
    rows += [Row(name, cells=("", "", reason)) for name, reason in missing.items()]
    numbers = range(warm_up, warm_up + len(reference))
    steps = statistics.mean(federation.num_steps(number) for number in numbers)
    return Table(
        federation.workload.title,
        "time over hand-written",
        rows,
        ("ms per round", "speed-up over sequential", "weights"),
        note=f"{len(reference)} rounds of {steps:.0f} steps; noise ±{noise_of(results):.3f}.",
        is_log=True,
    )


def judged(workload: Workload, alone: Mapping[str, Result], beside: Mapping[str, Result]) -> list[Row]:
    """Return a row for every bar of a workload whose two contestants took part."""
    rows = []
    for name, (other, sense, bar) in workload.bars.items():
        results = beside if name in PEERS else alone
        if name not in results or other not in results:
            continue
        mine, its = results[name].seconds, results[other].seconds
        found = ratios(its, mine) if sense == "faster" else ratios(mine, its)
        what = "speed-up over" if sense == "faster" else "time over"
        sign = "≤" if sense == "at most" else "≥"
        word = verdict(found, bar, sign, noise_of(results))
        rows.append(Row(f"{workload.name}: {_shown(name)}, {what} {_shown(other)}", found, bar, sign, word))
    return rows


def _shown(name: str) -> str:
    """The name of a contestant as a table has it: whose it is, too."""
    return name if name in (HAND, AGAIN, TWO_HANDS, PFL, FLOWER) else f"dovetail, {name}"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return 1 when Dovetail's weights differ from the hand-written loop's."""
    words = parser(__doc__)
    names = [workload.name for workload in WORKLOADS]
    words.add_argument("--workload", action="append", choices=names, help="only this one; may be given several times")
    words.add_argument("--repeats", type=int, help="rounds of each workload; its own number by default")
    words.add_argument("--threads", type=int, default=1, help="threads of torch; 1 by default, for all contestants")
    words.add_argument("--pfl-python", help="a Python that has pfl and torch")
    words.add_argument("--flower-python", help="a Python that has flwr[simulation] and torch")
    options = words.parse_args(arguments)
    torch.set_num_threads(options.threads)

    section = Section(
        "federated",
        "Federations",
        "A round of ten clients of a hundred, from the weights to the next weights: a lean loop written by hand, "
        "Dovetail's backends and compiled steps, and Apple's pfl and Flower's simulation, each in an environment of "
        "its own on the same data. Everyone has one thread per process.",
        is_quick=options.quick,
    )
    milliseconds, calls = around_a_client(3 if options.quick else 25)
    around = Row(
        "dovetail, around a client's steps", milliseconds, 1.0, verdict=verdict(milliseconds, 1.0), cells=(str(calls),)
    )
    section.add(
        Table("A client beyond its steps, 100,000 parameters", "ms", [around], ("Python calls",), is_drawn=False)
    )
    bars: list[Row] = []
    agree = True
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            if options.workload and workload.name not in options.workload:
                continue
            repeats, warm_up = options.repeats or workload.repeats[options.quick], 3
            federation = Federation(workload, warm_up + repeats)
            results, _ = measure(federation, contestants(federation, Path(folder)), repeats, warm_up)
            installed, missing = peers(federation, options, Path(folder))
            beside: dict[str, Result] = {}
            if installed:
                beside, failed = measure(federation, references(federation) | installed, repeats, warm_up)
                missing |= failed
            section.add(tabulate(federation, results, beside, missing, warm_up))
            bars += judged(workload, results, beside)
            agree &= results[SEQUENTIAL].gap == results[PROCESS].gap == 0
            # Of a compiled step it is asked where its speed is.
            asked = [results[name] for name in workload.bars if name in results]
            agree &= all(result.gap is None or result.gap <= 1e-5 for result in asked)
    section.add(Table("What is asked for", "ratio", bars, form="{:.2f}", is_drawn=False))
    section.save(options)
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
