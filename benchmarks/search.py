"""What experiments cost.

Part 1: the runner's own cost per trial, beyond starting its process. An experiment of trials that read
their hyperparameters and report one number is compared with starting the same command as often, with as many at a time.

Part 2: what early stopping saves. Random search and asynchronous halving look for a model of handwritten digits; both
draw the same hyperparameters in the same order, and halving may try three times as many. Epochs are counted, not
seconds.

Part 3: how long a sampler that learns thinks about the next trial, after many of them.

    python benchmarks/search.py [--trials 50] [--repeat 5] [--seeds 5] [--part 1] [--part 2] [--part 3]
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn

from dovetail import Epochs
from dovetail.callbacks import Callback
from dovetail.data import digits
from dovetail.search import search
from dovetail.search.processes import LocalBackend
from dovetail.search.runner import Runner
from dovetail.search.schema import read_experiment
from dovetail.search.searchers import make_searcher, read_searcher
from dovetail.search.space import Space
from dovetail.search.store import Store
from dovetail.trainers import Trainer, TrainingContext
from report import Row, Section, Table, parser, verdict

__all__ = ["main"]

LIMIT_MS = 50
LIMIT_EPOCHS = 0.4
EPOCHS = 27
# Only commands that the shell has itself, so that it starts no other process.
TRIAL = """
read -r _ <"$DOVETAIL_TRIAL"
echo '{"group": "validation", "steps_completed": 1, "metrics": {"loss": 0.5}}' >"${DOVETAIL_TRIAL%/*}/metrics.jsonl"
"""
SPACE = {
    "learning_rate": {"type": "log", "minval": -4, "maxval": 0},
    "momentum": {"type": "double", "minval": 0.0, "maxval": 0.99},
    "width": {"type": "int", "minval": 4, "maxval": 128},
    "batch_size": {"type": "categorical", "vals": [16, 64, 256]},
}


def main(arguments: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--trials", type=int, help="of an experiment; 50 by default")
    words.add_argument("--repeat", type=int, help="experiments and suggestions; 7 by default")
    words.add_argument("--seeds", type=int, help="of a search; 5 by default")
    words.add_argument("--part", type=int, action="append", choices=(1, 2, 3))
    options = words.parse_args(arguments)
    trials, repeat, seeds = options.trials or (50, 4)[options.quick], options.repeat or (7, 2)[options.quick], (5, 1)
    parts = options.part or (1, 2, 3)
    section = Section(
        "search",
        "Experiments",
        "The runner of experiments beyond the start of its trials' processes; asynchronous halving against random "
        "search, which draws the same hyperparameters and may try a third as many; and how long TPE thinks.",
        is_quick=options.quick,
    )
    if 1 in parts:
        section.add(costs(trials, repeat))
    if 2 in parts:
        section.add(savings(options.seeds or seeds[options.quick], (30, 3)[options.quick]))
    if 3 in parts:
        section.add(suggestions(repeat))
    section.save(options)
    return 0


def costs(trials: int, repeat: int) -> Table:
    rows = []
    for concurrent in (1, 2):
        samples = [runner_cost(trials, concurrent) for _ in range(repeat)]
        judged = verdict(samples, LIMIT_MS)
        rows.append(Row(f"{concurrent} at a time", samples, LIMIT_MS, verdict=judged))
    note = f"{repeat} experiments of {trials} trials that read a file and report one number."
    return Table("The runner's own cost per trial", "ms", rows, form="{:.1f}", note=note)


def runner_cost(trials: int, concurrent: int) -> float:
    """Return the milliseconds per trial that an experiment takes beyond the start of its processes."""
    searcher = {"name": "random", "metric": "loss", "max_trials": trials, "max_concurrent_trials": concurrent}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "code").mkdir()
        (Path(folder) / "code" / "trial.sh").write_text(TRIAL)
        config = {
            "entrypoint": "sh trial.sh",
            "hyperparameters": {"lr": {"type": "log", "minval": -4, "maxval": -1}},
            "searcher": searcher,
        }
        store = Store.open(Path(folder) / "home")
        record = store.create_experiment(read_experiment(config), "", Path(folder) / "code")
        runner = Runner(store, record.id, LocalBackend(slots=concurrent))
        begun = time.perf_counter()
        done = runner.run()
        taken = time.perf_counter() - begun
        assert [trial.state for trial in done.trials] == ["COMPLETED"] * trials
        return 1e3 * (taken - starting(Path(folder), trials, concurrent)) / trials


def starting(folder: Path, count: int, concurrent: int) -> float:
    """Return the seconds that it takes to start the command so often, with so many at a time."""
    (folder / "info.json").write_text("{}\n")
    command, env = (
        ["sh", str(folder / "code" / "trial.sh")],
        {**os.environ, "DOVETAIL_TRIAL": str(folder / "info.json")},
    )
    begun = time.perf_counter()
    for _ in range(0, count, concurrent):
        processes = [subprocess.Popen(command, env=env, start_new_session=True) for _ in range(concurrent)]
        for process in processes:
            process.wait()
    return time.perf_counter() - begun


def savings(seeds: int, num_random: int) -> Table:
    torch.set_num_threads(1)
    epochs, values = [], []
    halving = {"num_rungs": 4, "divisor": 3, "max_time": EPOCHS, "time_metric": "epochs"}
    for seed in range(seeds):
        used: list[int] = []
        best = []
        for searcher, max_trials, settings in (("random", num_random, {}), ("async_halving", 3 * num_random, halving)):
            count = Count()
            found = search(partial(train, count), SPACE, searcher, max_trials=max_trials, seed=seed, **settings)
            used.append(count.epochs)
            best.append(found.best_value)
        epochs.append(used[1] / used[0])
        values.append(best[1] / best[0])
    judged = verdict(epochs, LIMIT_EPOCHS)
    rows = [
        Row("epochs of training", epochs, LIMIT_EPOCHS, verdict=judged),
        Row("best validation loss", values),
    ]
    note = f"{seeds} seeds; digits, {num_random} trials of random search and {3 * num_random} of halving."
    return Table("Halving over random search", "ratio", rows, form="{:.2f}", note=note)


def suggestions(repeat: int) -> Table:
    config = read_searcher({"name": "tpe", "metric": "loss", "max_trials": 2000})
    rows = []
    for finished in (100, 1000):
        space, chance = Space(SPACE), random.Random(0)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study()
        for _ in range(finished):
            params = space.sample(chance)
            trial = optuna.trial.create_trial(params=params, distributions=space.distributions(), value=chance.random())
            study.add_trial(trial)
        searcher = make_searcher(config, space, seed=0)
        times = []
        for _ in range(repeat + 1):
            begun = time.perf_counter()
            searcher.suggest(study, finished)
            times.append(1e3 * (time.perf_counter() - begun))
        # The first one imports.
        rows.append(Row(f"after {finished} trials", times[1:]))
    return Table("A suggestion of TPE", "ms", rows, form="{:.1f}", note=f"{repeat} suggestions each.", is_drawn=False)


@dataclass
class Count:
    epochs: int = 0


def train(count: Count, hparams: dict[str, Any], report: Callable[[int, float], None]) -> None:
    """Train a small network, and report its validation loss after every epoch."""
    (x, y), (valid_x, valid_y) = ((part.tensors[0].flatten(1), part.tensors[1]) for part in DIGITS[:2])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, hparams["width"]), nn.ReLU(), nn.Linear(hparams["width"], 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=hparams["learning_rate"], momentum=hparams["momentum"])
    trainer = Trainer(model, "cpu", optimizer=optimizer, seed=0, verbose=False, nonfinite="ignore")

    class Report(Callback):
        def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
            count.epochs += 1
            report(context.progress.epoch, metrics["valid_loss"])

    trainer.context.callbacks.add(Report())
    trainer.options.batch_size = hparams["batch_size"]
    trainer.fit((x, y), (valid_x, valid_y), max_length=Epochs(EPOCHS))


DIGITS = digits()


if __name__ == "__main__":
    sys.exit(main())
