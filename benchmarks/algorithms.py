"""What the papers claim: which federated algorithm is ahead of which, and by how much, on data made here.

Four experiments, the median of three seeds each, and for every claim what was found and what is asked for:

- drift: clients that make many steps of their own pull FedAvg away from the optimum, and neither SCAFFOLD nor FedDyn.
- stability: FedProx's term calms the global loss where devices differ much.
- personalisation: where clients have two classes each, models of their own beat the one of all.
- iid: where clients are alike, they do not. A win there would be a leak.

    python benchmarks/algorithms.py --output results                 # everything, some minutes
    python benchmarks/algorithms.py --quick                          # one seed, few rounds: to see that it works
    python benchmarks/algorithms.py --only drift --only stability --seeds 0 1 2 3 4
    python benchmarks/algorithms.py --only drift --also fedadam                # with one more
    python benchmarks/algorithms.py --backend vectorized --compiled  # the same orderings, sooner

All federations are run by `fedavg.Server(...).run(simple.Client(...))`. All algorithms of a seed begin with the same
model and the same data, and everything else follows from the seed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dovetail.algorithms import (
    APFL,
    SCAFFOLD,
    Algorithm,
    Ditto,
    FedAvg,
    FedDyn,
    FedPer,
    FedProx,
    FedRep,
    LGFedAvg,
    algorithms,
)
from dovetail.clients.simple import Client
from dovetail.data.datasets import digits, fashion_mnist
from dovetail.data.models import logistic, mlp
from dovetail.errors import DataError
from dovetail.federated import ServerCallback
from dovetail.federated.data.partition import iid, label_quantity
from dovetail.federated.data.sources import Datasource, leaf_synthetic
from dovetail.federated.postprocess import Weighting
from dovetail.servers.fedavg import Server
from dovetail.trainers import CompiledTrainer
from dovetail.trainers.base import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy, ShuffleDataLoaderStrategy

__all__ = [
    "EXPERIMENTS",
    "Claim",
    "Experiment",
    "Findings",
    "alike",
    "drift",
    "handwritten_digits",
    "main",
    "no_free_lunch",
    "personalisation",
    "stability",
    "synthetic",
    "two_classes",
]

Weights = Mapping[str, Tensor]
Samples = tuple[Tensor, Tensor]
# Algorithms that take part without a claim of ours, by name.
Also = Mapping[str, Callable[[], Algorithm]]
# For training, and for tests.
Images = tuple[Samples, Samples]


@dataclass(frozen=True)
class Claim:
    """What is said of an experiment.

    Attributes:
        text: For the table.
        sense: `"<"`, `"≤"` or `"≥"`: how what is found must stand to the bar.
        bar: The number that is asked for.
        form: How numbers are written.
    """

    text: str
    sense: str
    bar: float
    form: str = "{:.2f}"

    def holds(self, found: float) -> bool:
        """Whether a number reaches the bar; one that is not a number does not."""
        return {"<": found < self.bar, "≤": found <= self.bar, "≥": found >= self.bar}[self.sense]


@dataclass
class Findings:
    """What one seed of an experiment has brought.

    Attributes:
        values: By algorithm, the number that is compared.
        curves: By algorithm, what the figure shows round after round.
        found: By the text of a claim, the number that is held against its bar.
    """

    values: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        name: For the command line.
        title: For table and figure.
        setting: What is run, in a sentence or two.
        unit: What the figure shows.
        values: What is compared.
        run: Makes the findings of a seed, with so many rounds, on a backend.
        rounds: How many rounds, and how many in a quick run.
        claims: What is held against them.
        draw: Draws the findings of all seeds.
        form: How values are written.
    """

    name: str
    title: str
    setting: str
    unit: str
    values: str
    run: Callable[..., Findings]
    rounds: tuple[int, int]
    claims: Sequence[Claim]
    draw: Callable[[Any, Sequence[Findings]], None]
    form: str = "{:.3g}"


# ------------------------------------------------------------------ what experiments share


class Kept(Datasource):
    """Clients' data, made once: what takes time shall be training.

    Args:
        train: What each client trains on.
        test: What each client tests on; None for nothing.
        steps: Where it is not 0, an epoch is so many batches, each of which is all that the client has.
    """

    knows_sizes = True

    def __init__(self, train: Sequence[Samples], test: Sequence[Samples] | None = None, steps: int = 0) -> None:
        self.num_clients = len(train)
        self.train, self.test, self.steps = train, test, steps

    def train_data(self, client_id: int) -> Any:
        samples = self.train[client_id - 1]
        return [samples] * self.steps if self.steps else samples

    def num_samples(self, client_id: int) -> int:
        return len(self.train[client_id - 1][1])

    def test_data(self, client_id: int) -> Samples | None:
        return None if self.test is None else self.test[client_id - 1]


class Watch(ServerCallback):
    """Keeps a number of the global model after every round."""

    def __init__(self, number: Callable[[Weights], Tensor]) -> None:
        self.number = number
        self.curve: list[float] = []

    def on_clients_processed(self, server: Any) -> None:
        self.curve.append(float(self.number(server.weights)))


class Alone(Algorithm):
    """No federation: nothing of the model is ever sent, and every client trains its own."""

    def is_local(self, name: str) -> bool:
        return True


# One device in twenty would otherwise have most of the samples, and take most of the time.
MOST_SAMPLES = 1000


def synthetic(num_clients: int, seed: int, most: int, dtype: torch.dtype = torch.float32) -> list[Samples]:
    """Return the training data of Synthetic(1, 1); a client has so many samples at most."""
    made = leaf_synthetic(1.0, 1.0, num_clients, seed, max_samples=most)
    drawn = [made.train_data(client_id) for client_id in range(1, num_clients + 1)]
    return [(x.to(dtype), y) for x, y in drawn]


def federate(
    algorithm: Algorithm,
    data: Datasource,
    model: nn.Module | Callable[[], nn.Module],
    trainer: Trainer,
    callbacks: Sequence[ServerCallback] = (),
    **settings: Any,
) -> Server:
    """Run a federation to its end, and return the server.

    Raises:
        RuntimeError: A client was left out: what is compared would not be what is said.
    """
    server = Server(
        model, data, algorithm, trainer=trainer, callbacks=callbacks, total_clients=data.num_clients, **settings
    )
    for record in server.run(Client(trainer=trainer)):
        if record.faults:
            raise RuntimeError(f"{algorithm!r}, round {record.round}: {record.faults[0].reason}")
    return server


# ------------------------------------------------------------------ drift

LOCAL_STEPS, DECAY = 20, 0.01
# Large enough that 20 steps come close to the minimum of a client's objective, which FedDyn asks for.
FEDDYN_ALPHA = 0.5

SCAFFOLD_IS_NEAR = Claim("distance to the optimum: SCAFFOLD over FedAvg", "<", 0.20, "{:.1%}")
FEDDYN_IS_THERE = Claim("distance to the optimum: FedDyn over FedAvg", "<", 0.01, "{:.4%}")


def drift(
    seed: int,
    rounds: int = 300,
    backend: str = "sequential",
    num_devices: int = 20,
    most: int = MOST_SAMPLES,
    also: Also = MappingProxyType({}),
) -> Findings:
    """How far from the optimum are FedAvg, SCAFFOLD and FedDyn, if clients make 20 steps with all their data?

    All three minimise the same objective, in which every client counts the same: that is what SCAFFOLD's and FedDyn's
    servers do, and FedAvg's does so if it is told. The term of the weights is part of every client's objective.
    """
    clients = synthetic(num_devices, seed, most, torch.float64)

    def objective(weights: Weights) -> Tensor:
        weight, bias = weights["1.weight"], weights["1.bias"]
        losses = [cross_entropy(x @ weight.T + bias, y) for x, y in clients]
        return torch.stack(losses).mean() + DECAY / 2 * (weight.square().sum() + bias.square().sum())

    least = _minimum(objective)
    findings = Findings()
    contestants: dict[str, Algorithm] = {
        "FedAvg": FedAvg(),
        "SCAFFOLD": SCAFFOLD(),
        "FedDyn": FedDyn(alpha=FEDDYN_ALPHA),
        **{name: make() for name, make in also.items()},
    }
    for name, algorithm in contestants.items():
        watch = Watch(objective)
        federate(
            algorithm,
            Kept(clients, steps=LOCAL_STEPS),
            lambda: logistic().double(),
            ComposableTrainer(
                optimizer_strategy=SGDOptimizerStrategy(lr=0.02, weight_decay=DECAY), num_epochs=1, verbose=False
            ),
            [watch],
            rounds=rounds,
            per_round=num_devices,
            seed=seed,
            backend=backend,
            postprocessors=[Weighting("uniform")],
        )
        findings.curves[name] = [value - least for value in watch.curve]
        findings.values[name] = findings.curves[name][-1]
    for claim, name in ((SCAFFOLD_IS_NEAR, "SCAFFOLD"), (FEDDYN_IS_THERE, "FedDyn")):
        findings.found[claim.text] = findings.values[name] / findings.values["FedAvg"]
    return findings


def _minimum(objective: Callable[[Weights], Tensor]) -> float:
    """Return the least value of a convex function of a logistic model's weights."""
    weights = {name: value.detach().requires_grad_() for name, value in logistic().double().state_dict().items()}
    # Torch does not say what its `step` takes.
    optimizer: Any = torch.optim.LBFGS(
        list(weights.values()),
        max_iter=5000,
        max_eval=10_000,
        tolerance_grad=1e-9,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(weights)
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)
    least = float(closure().detach())
    gradients = [value.grad for value in weights.values() if value.grad is not None]
    if max(float(gradient.abs().max()) for gradient in gradients) > 1e-7:
        raise RuntimeError("L-BFGS has not found the optimum")
    return least


# ------------------------------------------------------------------ stability

CALM, ROUGH = "FedProx, μ = 1", "μ = 0"

IS_CALMER = Claim("movement of the loss from round to round: μ = 1 over μ = 0", "<", 0.7)
IS_NO_WORSE = Claim("training loss: μ = 1 over μ = 0", "≤", 1.02)


def stability(
    seed: int,
    rounds: int = 100,
    backend: str = "sequential",
    model: nn.Module | Callable[[], nn.Module] = logistic,
    most: int = MOST_SAMPLES,
    compiled: bool = False,
    also: Also = MappingProxyType({}),
) -> Findings:
    """How much does the global training loss move from round to round, with and without FedProx's term?"""
    clients = synthetic(30, seed, most)
    inputs, labels = (torch.cat(column) for column in zip(*clients, strict=True))
    findings = Findings()
    losses: dict[str, float] = {}
    # FedProx with μ = 0 is FedAvg, and takes longer.
    others = [(name, make()) for name, make in also.items()]
    for name, algorithm in ((ROUGH, FedAvg()), (CALM, FedProx(mu=1.0)), *others):
        watch = Watch(lambda weights: cross_entropy(inputs @ weights["1.weight"].T + weights["1.bias"], labels))
        plain = ComposableTrainer(
            optimizer_strategy=SGDOptimizerStrategy(lr=0.01),
            data_loader_strategy=ShuffleDataLoaderStrategy(),
            num_epochs=20,
            batch_size=10,
            verbose=False,
        )
        trainer = CompiledTrainer(plain, mode="step", steps_per_call=8) if compiled else plain
        settings = {"rounds": rounds, "per_round": 10, "seed": seed, "backend": backend}
        federate(algorithm, Kept(clients), model, trainer, [watch], **settings)
        second_half = watch.curve[rounds // 2 :]
        findings.curves[name] = watch.curve
        findings.values[name] = statistics.fmean(abs(after - before) for before, after in pairwise(second_half))
        losses[name] = statistics.fmean(second_half)
    findings.found[IS_CALMER.text] = findings.values[CALM] / findings.values[ROUGH]
    findings.found[IS_NO_WORSE.text] = losses[CALM] / losses[ROUGH]
    return findings


# ------------------------------------------------------------------ personalisation, and where it does not help

PER_CLIENT, TEST_PER_CLIENT = 300, 200
HIDDEN, LOCAL_EPOCHS = 64, 5

# Who makes models of clients' own in a round after the last one, with as many epochs as the others.
AFTERWARDS = ("fedavg_finetune", "fedbabu", "perfedavg")

PERSONALISED: Mapping[str, Callable[[], Algorithm]] = {
    "FedPer": FedPer,
    # The head has all epochs but one, as in the paper.
    "FedRep": lambda: FedRep(local_epochs=LOCAL_EPOCHS - 1),
    # As in the paper, the representation stays, and the head is everybody's.
    "LG-FedAvg": lambda: LGFedAvg(global_layer_names=["3"]),
    "Ditto": lambda: Ditto(personalization_epochs=LOCAL_EPOCHS),
    "APFL": APFL,
}


def personalisation(
    seed: int,
    rounds: int = 20,
    backend: str = "sequential",
    data: Datasource | None = None,
    lr: float = 0.03,
    also: Also = MappingProxyType({}),
) -> Findings:
    """How good are models for clients that have two classes each, on new images of these classes?"""
    contestants = {"FedAvg": FedAvg, "local only": Alone, **PERSONALISED, **also}
    findings = Findings(_accuracies(contestants, data or two_classes(seed), lr, rounds, seed, backend))
    for name in PERSONALISED:
        gain, reached = _personal_claims(name)
        findings.found[gain.text] = findings.values[name] - findings.values["FedAvg"]
        findings.found[reached.text] = findings.values[name]
    return findings


def no_free_lunch(
    seed: int,
    rounds: int = 20,
    backend: str = "sequential",
    data: Datasource | None = None,
    lr: float = 0.03,
    also: Also = MappingProxyType({}),
) -> Findings:
    """How good are they for clients that all have the same mix of classes?"""
    contestants = {"FedAvg": FedAvg, "local only": Alone, "FedPer": FedPer, "Ditto": PERSONALISED["Ditto"], **also}
    findings = Findings(_accuracies(contestants, data or alike(seed), lr, rounds, seed, backend))
    for claim, name in ((ALONE_IS_WORSE, "local only"), (FEDPER_IS_NO_LEAK, "FedPer"), (DITTO_IS_NO_LEAK, "Ditto")):
        findings.found[claim.text] = findings.values[name] - findings.values["FedAvg"]
    return findings


def two_classes(seed: int, num_clients: int = 20, images: Images | None = None) -> Kept:
    """Return clients that have two classes each, as many images of one as of the other."""

    def cut(samples: Samples, number: int) -> list[Samples]:
        # By the same seed, a client has the same classes for training and for tests.
        partition = label_quantity(samples[1], num_clients, classes_per_client=2, seed=seed)
        return [_balanced(samples, indices, number) for indices in partition]

    train, test = images or installed_images()
    return Kept(cut(train, PER_CLIENT), cut(test, TEST_PER_CLIENT))


def alike(seed: int, num_clients: int = 20, images: Images | None = None) -> Kept:
    """Return clients that have any classes."""

    def cut(samples: Samples, number: int) -> list[Samples]:
        size = min(number, len(samples[1]) // num_clients)
        partition = iid(len(samples[1]), num_clients, partition_size=size, seed=seed)
        return [(samples[0][indices], samples[1][indices]) for indices in partition]

    train, test = images or installed_images()
    return Kept(cut(train, PER_CLIENT), cut(test, TEST_PER_CLIENT))


def installed_images() -> Images:
    """Return Fashion-MNIST, or else digits."""
    try:
        train, test = fashion_mnist()
    except DataError as error:
        print(f"DIGITS, and fewer of them, in place of Fashion-MNIST: {error}", file=sys.stderr)
        return handwritten_digits()
    return (train.tensors[0], train.tensors[1]), (test.tensors[0], test.tensors[1])


def handwritten_digits() -> Images:
    """Return images that are there wherever scikit-learn is; too few for all that clients shall have."""
    train, test = digits((0.7, 0.3))
    return (train.tensors[0], train.tensors[1]), (test.tensors[0], test.tensors[1])


def _personal_claims(name: str) -> tuple[Claim, Claim]:
    return (
        Claim(f"points on clients' own test data: {name} above FedAvg", "≥", 10.0, "{:+.1f}"),
        Claim(f"accuracy on clients' own test data: {name}", "≥", 92.0, "{:.1f} %"),
    )


ALONE_IS_WORSE = Claim("points on clients' own test data: local only above FedAvg", "<", 0.0, "{:+.1f}")
FEDPER_IS_NO_LEAK = Claim("points on clients' own test data: FedPer above FedAvg", "≤", 1.5, "{:+.1f}")
DITTO_IS_NO_LEAK = Claim("points on clients' own test data: Ditto above FedAvg", "≤", 1.5, "{:+.1f}")


def _accuracies(
    contestants: Mapping[str, Callable[[], Algorithm]],
    data: Datasource,
    lr: float,
    rounds: int,
    seed: int,
    backend: str,
) -> dict[str, float]:
    """Return how many in a hundred of their own test samples clients tell right, by algorithm."""
    features = data.train_data(1)[0][0].numel()
    found = {}
    for name, algorithm in contestants.items():
        server = federate(
            algorithm(),
            data,
            lambda: mlp(features, 10, (HIDDEN,)),
            ComposableTrainer(
                optimizer_strategy=SGDOptimizerStrategy(lr=lr),
                data_loader_strategy=ShuffleDataLoaderStrategy(),
                num_epochs=LOCAL_EPOCHS,
                batch_size=30,
                verbose=False,
            ),
            rounds=rounds,
            per_round=data.num_clients,
            seed=seed,
            backend=backend,
        )
        judged_now = server.personalize() if name in AFTERWARDS else server.evaluate_clients()
        found[name] = 100 * judged_now.mean("accuracy")
    return found


def _balanced(samples: Samples, indices: Tensor, number: int) -> Samples:
    """Return at most so many of the samples, as many of every class that is among them."""
    own = samples[1][indices]
    counts = own.bincount()
    classes = counts.nonzero().flatten()
    size = min(number // len(classes), int(counts[classes].min()))
    chosen = torch.cat([indices[own == label][:size] for label in classes])
    return samples[0][chosen], samples[1][chosen]


# ------------------------------------------------------------------ the figure

INK, QUIET = "#333333", "#999999"
COLOURS = {
    "FedAvg": "#777777",
    ROUGH: "#777777",
    "local only": "#bbbbbb",
    "SCAFFOLD": "#0072b2",
    "FedDyn": "#d55e00",
    CALM: "#009e73",
    "FedPer": "#56b4e9",
    "FedRep": "#0072b2",
    "LG-FedAvg": "#e69f00",
    "Ditto": "#cc79a7",
    "APFL": "#009e73",
}
OTHER = "#7f5539"


def _draw_medians(axes: Any, findings: Sequence[Findings]) -> None:
    """One line per algorithm, the median of the seeds, with their range behind it."""
    for name in findings[0].curves:
        curves = torch.tensor([each.curves[name] for each in findings], dtype=torch.float64)
        rounds = range(1, curves.shape[1] + 1)
        low, middle, high = curves.amin(0), curves.median(0).values, curves.amax(0)
        axes.fill_between(rounds, low, high, color=COLOURS.get(name, OTHER), alpha=0.18, linewidth=0)
        axes.plot(rounds, middle, color=COLOURS.get(name, OTHER), linewidth=1.5, label=name)
    axes.set_yscale("log")
    _finish_curves(axes)


def _draw_seeds(axes: Any, findings: Sequence[Findings]) -> None:
    """One line per algorithm and seed: a median would hide how a line moves."""
    for name in findings[0].curves:
        for number, each in enumerate(findings):
            curve = each.curves[name]
            label = None if number else name
            axes.plot(
                range(1, len(curve) + 1), curve, color=COLOURS.get(name, OTHER), linewidth=0.9, alpha=0.9, label=label
            )
    axes.set_ylim(bottom=0)
    _finish_curves(axes)


def _finish_curves(axes: Any) -> None:
    axes.set_xlabel("round", color=INK, fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _draw_dots(axes: Any, findings: Sequence[Findings]) -> None:
    """One row per algorithm: the median of the seeds as a number and a large dot, each seed as a small one."""
    names = list(findings[0].values)
    middles = [statistics.median(each.values[name] for each in findings) for name in names]
    for place, (name, middle) in enumerate(zip(names, middles, strict=True)):
        values = [each.values[name] for each in findings]
        axes.plot([min(values), max(values)], [place] * 2, color=COLOURS.get(name, OTHER), linewidth=1.5, alpha=0.5)
        axes.plot(values, [place] * len(values), "o", color=COLOURS.get(name, OTHER), markersize=3.5)
        axes.plot(middle, place, "o", color=COLOURS.get(name, OTHER), markersize=8)
        axes.text(
            1.02, place, f"{middle:.1f}", transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=INK
        )
    axes.axvline(middles[0], color=QUIET, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    # So that a point is as wide in one panel as in the other.
    axes.set_xlim(min(50.0, *(min(each.values.values()) for each in findings)) - 2, 100)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("% of a client's test images, mean over clients", color=INK, fontsize=8)


def draw(results: Mapping[str, Sequence[Findings]], path: Path) -> None:
    """Write the figure, a panel for each experiment."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [experiment for experiment in EXPERIMENTS if experiment.name in results]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, experiment in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, place)
        experiment.draw(axes, results[experiment.name])
        axes.set_title(f"{experiment.name}: {experiment.unit}", loc="left", fontsize=9, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# ------------------------------------------------------------------ all experiments

EXPERIMENTS = (
    Experiment(
        "drift",
        "Client drift",
        "Synthetic(1, 1), 20 devices, all in every round, 20 full-batch steps of 0.02, logistic regression in float64 "
        "with weight decay 0.01: the objective is the mean over devices of their cross entropy, plus 0.005 ‖w‖² of "
        f"weights and biases, and L-BFGS computes its optimum. FedDyn's α is {FEDDYN_ALPHA}. All devices have "
        f"the same weight, and at most {MOST_SAMPLES} samples.",
        "objective above its optimum",
        "objective above its optimum, after the last round",
        drift,
        (300, 20),
        (SCAFFOLD_IS_NEAR, FEDDYN_IS_THERE),
        _draw_medians,
    ),
    Experiment(
        "stability",
        "Stability",
        "The setting of the FedProx paper: Synthetic(1, 1), 30 devices, 10 per round, 20 epochs, learning rate 0.01, "
        "batches of 10, logistic regression. The measured value is the mean of |L(t+1) − L(t)| of the global training "
        f"loss over the second half of the rounds. Devices have at most {MOST_SAMPLES} samples.",
        "global training loss",
        "movement of the global training loss",
        stability,
        (100, 8),
        (IS_CALMER, IS_NO_WORSE),
        _draw_seeds,
    ),
    Experiment(
        "personalisation",
        "Personalisation",
        "Fashion-MNIST, 20 clients with two classes each, 150 training images and 100 test images of each class, "
        f"all clients in every round, {LOCAL_EPOCHS} epochs, batches of 30, learning rate 0.03, MLP 784-{HIDDEN}-10. "
        "FedPer and FedRep keep the head, LG-FedAvg the layer before it. Local only: nothing is sent, and every client "
        "trains alone, for the same number of epochs. If Fashion-MNIST is not installed, the script uses the smaller "
        "digits dataset.",
        "accuracy on clients' own test data",
        "accuracy on clients' own test data, %",
        personalisation,
        (20, 6),
        tuple(claim for name in PERSONALISED for claim in _personal_claims(name)),
        _draw_dots,
        "{:.1f}",
    ),
    Experiment(
        "iid",
        "No free lunch",
        "The same setting, but every client has 300 training images and 200 test images of any class.",
        "accuracy on clients' own test data",
        "accuracy on clients' own test data, %",
        no_free_lunch,
        (20, 6),
        (ALONE_IS_WORSE, FEDPER_IS_NO_LEAK, DITTO_IS_NO_LEAK),
        _draw_dots,
        "{:.1f}",
    ),
)


# ------------------------------------------------------------------ reporting


def judged(experiment: Experiment, findings: Sequence[Findings], quick: bool) -> list[dict[str, Any]]:
    """Return what was found of every claim, over the seeds, and whether it holds."""
    rows = []
    for claim in experiment.claims:
        each = [one.found[claim.text] for one in findings]
        found = statistics.median(each)
        # A quick run has too few rounds to say that something is missed.
        verdict = "ok" if claim.holds(found) else "unclear" if quick else "MISSED"
        rows.append(
            {
                "claim": claim.text,
                "found": found,
                "seeds": each,
                "bar": claim.bar,
                "verdict": verdict,
                "shown": (
                    claim.form.format(found),
                    ", ".join(map(claim.form.format, each)),
                    f"{claim.sense} {claim.form.format(claim.bar)}",
                    verdict,
                ),
            }
        )
    return rows


def show(experiment: Experiment, rows: Sequence[Mapping[str, Any]], caption: str, console: Console) -> None:
    """Print the claims of an experiment."""
    table = Table(title=experiment.title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("claim")
    for heading in ("found", "seeds", "bar"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(row["claim"], *row["shown"])
    console.print(table)


def markdown(experiment: Experiment, findings: Sequence[Findings], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of an experiment: claims, and the numbers of every algorithm."""
    lines = [f"## {experiment.title}", "", experiment.setting, ""]
    lines += ["| claim | found | seeds | bar | |", "|---|---|---|---|---|"]
    lines += [f"| {row['claim']} | {' | '.join(row['shown'])} |" for row in rows]
    lines += ["", f"| {experiment.values} | median | seeds |", "|---|---|---|"]
    for name in findings[0].values:
        each = [one.values[name] for one in findings]
        written = map(experiment.form.format, each)
        lines.append(f"| {name} | {experiment.form.format(statistics.median(each))} | {', '.join(written)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the experiments, and return 1 when a claim is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [experiment.name for experiment in EXPERIMENTS]
    parser.add_argument("--only", action="append", choices=names, help="only this one; may be given several times")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME",
        help="an algorithm that takes part, by its name",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, few rounds: to see that it works")
    parser.add_argument("--seeds", type=int, nargs="+", help="0 1 2 by default")
    parser.add_argument("--backend", default="sequential", help="where clients run; sequential by default")
    parser.add_argument(
        "--compiled", action="store_true", help="compile the steps of stability, of which there are most"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; 1 by default")
    parser.add_argument("--output", type=Path, help="write algorithms.md and algorithms.png into this folder")
    parser.add_argument("--plot", type=Path, help="write the figure to this file")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])

    console = Console(width=150, stderr=True)
    machine = (
        f"Python {platform.python_version()}, torch {torch.__version__}, {options.threads} threads, "
        f"{os.cpu_count()} cores, {platform.machine()}, {date.today()}"
    )
    results: dict[str, list[Findings]] = {}
    verdicts: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, float] = {}
    text = [f"`python {' '.join(sys.argv)}`: seeds {', '.join(map(str, seeds))}; {machine}.\n"]
    for experiment in EXPERIMENTS:
        if options.only and experiment.name not in options.only:
            continue
        started = time.perf_counter()
        rounds = experiment.rounds[options.quick]
        extra = {"compiled": True} if options.compiled and experiment.run is stability else {}
        also = {name: algorithms.get(name) for name in options.also}
        findings = [experiment.run(seed, rounds, options.backend, also=also, **extra) for seed in seeds]
        seconds[experiment.name] = time.perf_counter() - started
        rows = judged(experiment, findings, options.quick)
        caption = f"{rounds} rounds, median of {len(seeds)} seeds, {seconds[experiment.name]:.0f} s"
        show(experiment, rows, caption, console)
        text.append(markdown(experiment, findings, rows) + f"\n{rounds} rounds.\n")
        results[experiment.name], verdicts[experiment.name] = findings, rows
    print("\n".join(text))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "algorithms.md").write_text("\n".join(text), encoding="utf-8")
    plots = [options.plot] if options.plot else []
    for path in plots + ([options.output / "algorithms.png"] if options.output else []):
        draw(results, path)
    if options.json:
        found = {
            name: {
                "seconds": seconds[name],
                "claims": [{key: value for key, value in row.items() if key != "shown"} for row in verdicts[name]],
                "seeds": [{"seed": seed, **asdict(one)} for seed, one in zip(seeds, results[name], strict=True)],
            }
            for name in results
        }
        options.json.write_text(json.dumps({"machine": machine, "experiments": found}, indent=2) + "\n")
    return int(any(row["verdict"] == "MISSED" for rows in verdicts.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
