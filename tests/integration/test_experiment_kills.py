"""Experiments whose runners and trials are killed, again and again, and end as if nothing had been.

Real processes and real `SIGKILL`s at random moments. `DOVETAIL_TORTURE=1` runs the same code at full size: 100 kills
instead of 12, and a kill at every single operation of a runner.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.config import parse_config
from dovetail.search.processes import ATTEMPT, Attempt
from dovetail.search.records import ExperimentRecord
from dovetail.search.runner import Runner
from dovetail.search.schema import read_experiment
from dovetail.search.store import Store

_TORTURE = os.environ.get("DOVETAIL_TORTURE") == "1"
_KILLS = 100 if _TORTURE else 8

pytestmark = [pytest.mark.full_size, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
entrypoint: python3 trial.py
hyperparameters:
  lr: {type: double, minval: 0, maxval: 1}
searcher: SEARCHER
max_restarts: 1000
data: {ledger: LEDGER}
"""
SEARCHERS = {
    "random": "{name: random, metric: loss, max_trials: 8, max_concurrent_trials: 3}",
    # Its suggestions depend on all finished trials.
    "tpe": "{name: tpe, metric: loss, max_trials: 8, max_concurrent_trials: 1, num_startup_trials: 3}",
}


def _create(folder: Path, searcher: str) -> tuple[Store, ExperimentRecord]:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "trial.py").write_text(Path(__file__).with_name("killed_trial.py").read_text())
    text = CONFIG.replace("SEARCHER", SEARCHERS[searcher]).replace("LEDGER", str(folder / "ledger.jsonl"))
    store = Store.open(folder / "home")
    return store, store.create_experiment(read_experiment(parse_config(text)), text, folder / "code")


def _start(store: Store, experiment: ExperimentRecord) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-m", "dovetail.search", str(store.home), str(experiment.id)]
    with open(experiment.directory / "output.txt", "ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def _processes(store: Store) -> list[psutil.Process]:
    """Return all processes of trials of a store, with the shells that look after them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(ATTEMPT, "").startswith(str(store.home)):
                found.append(process)
    return found


def _ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def _summary(record: ExperimentRecord) -> list[tuple[Any, ...]]:
    return [(it.number, it.state, it.hparams, it.values, it.best, it.best_at) for it in record.trials]


def _check_exactly_once(folder: Path, record: ExperimentRecord) -> None:
    """Every trial has finished in one attempt, its last one, and no attempt was run by two processes."""
    rows = _ledger(folder)
    begun = Counter((row["trial"], row["attempt"]) for row in rows if row["begun"])
    assert set(begun.values()) == {1}, begun
    for trial in record.trials:
        codes = [attempt.exit_code for attempt in Attempt.all_of(trial.directory)]
        # Of invalid hyperparameters it is enough that the trial has said so.
        assert codes[-1] == 0 or trial.state == "INVALID_HP", (trial, codes)
        assert 0 not in codes[:-1], (trial, codes)
        # A shell that was killed before its start counts, and has left nothing.
        assert trial.restarts >= len(codes) - 1
        finished = [row["attempt"] for row in rows if row["trial"] == trial.id and not row["begun"]]
        # One that was killed after its last line has not finished: its exit code is missing.
        assert finished.count(len(codes) - 1) == (1 if trial.state == "COMPLETED" else 0)


def _kill_something(store: Store, experiment_id: int, runner: subprocess.Popen[bytes], moments: random.Random) -> bool:
    """Kill the runner, a trial or its shell after a moment, and return whether there was one to kill."""
    # Most of the time it has started; a process that imports its modules is as easy to kill as any other.
    begins = moments.random() < 0.1
    while not begins and runner.poll() is None and not store.experiment(experiment_id).is_running:
        time.sleep(0.01)
    with suppress(subprocess.TimeoutExpired):
        runner.wait(moments.uniform(0, 0.4))
    if moments.random() < 0.5:
        if runner.poll() is not None:
            return False
        runner.kill()
        return True
    victims = _processes(store)
    if not victims:
        return False
    with suppress(psutil.Error):
        moments.choice(victims).kill()
        return True
    return False


def _torture(folder: Path, searcher: str, kills: int) -> int:
    """Kill until `kills` have hit; every experiment must end as an undisturbed one. Returns how many there were."""
    store, experiment = _create(folder / "reference", searcher)
    runner = _start(store, experiment)
    assert runner.wait(120) == 0
    reference = store.experiment(experiment.id)
    assert reference.state == "COMPLETED"
    assert {trial.state for trial in reference.trials} == {"COMPLETED", "INVALID_HP"}
    _check_exactly_once(folder / "reference", reference)
    moments, hits = random.Random(0), 0
    for run in itertools.count(1):
        place = folder / f"run-{run}"
        store, experiment = _create(place, searcher)
        runner = _start(store, experiment)
        deadline = time.monotonic() + 300
        while runner.poll() != 0:
            assert time.monotonic() < deadline, (experiment.directory / "runner.log").read_text()
            if hits < kills:
                hits += _kill_something(store, experiment.id, runner, moments)
            else:
                with suppress(subprocess.TimeoutExpired):
                    runner.wait(60)
            if runner.poll() is not None and runner.returncode != 0:
                assert runner.returncode == -signal.SIGKILL, (experiment.directory / "output.txt").read_text()
                runner = _start(store, experiment)
        record = store.experiment(experiment.id)
        assert record.state == "COMPLETED"
        assert _summary(record) == _summary(reference)
        _check_exactly_once(place, record)
        assert _processes(store) == []
        if hits >= kills:
            return run
    raise AssertionError("the loop ends by itself")


@pytest.mark.parametrize("searcher", ["random", pytest.param("tpe", marks=pytest.mark.torture)])
def test_an_experiment_killed_repeatedly_ends_as_an_uninterrupted_one(searcher: str, tmp_path: Path) -> None:
    runs = _torture(tmp_path, searcher, _KILLS // 2)
    print(f"{_KILLS // 2} kills over {runs} experiments")


def test_an_experiment_survives_a_kill_at_any_operation_of_its_runner(tmp_path: Path) -> None:
    stride = 1 if _TORTURE else 23
    command = [sys.executable, "-W", "error", Path(__file__).with_name("dying_runner.py"), tmp_path, str(stride)]
    reported = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    reference, *killed, last = map(json.loads, reported.splitlines())
    assert {trial[1] for trial in reference["trials"]} == {"COMPLETED", "INVALID_HP"}
    assert any(trial[5] for trial in reference["trials"])
    # The last one had so few operations that it was not killed.
    assert reference["codes"] == last["codes"] == [0, 0]
    assert len(killed) > 20 / stride
    for run in killed:
        assert run["codes"] == [-signal.SIGKILL, 0], run
        assert {**run, "die_at": None, "codes": [0, 0]} == reference


# ------------------------------------------------------------------ a real training

TRAINING = """
import os, signal, time
from pathlib import Path

from trials import Classifier

from dovetail import pytorch
from dovetail.info import get_cluster_info
from dovetail.pytorch import Batch, Epoch

info = get_cluster_info()
attempt = Path(os.environ["DOVETAIL_ATTEMPT"])


class Disturbed(Classifier):
    def train_batch(self, batch, epoch_idx, batch_idx):
        if info.user_data["disturb"]:
            if (attempt.name, batch_idx) == ("0", 9):
                os.kill(os.getpid(), signal.SIGKILL)
            if (attempt.name, batch_idx) == ("1", 13):
                (Path(info.directory).parents[1] / "wish").write_text("pause")
                while not self.context.get_stop_requested() and not (attempt / "asked").exists():
                    time.sleep(0.01)
        return super().train_batch(batch, epoch_idx, batch_idx)


context = pytorch.init()
trial = context.build_trial(Disturbed)
context.fit(
    trial, max_length=Epoch(3), validation_period=Batch(4), checkpoint_period=Batch(4), reporting_period=Batch(4)
)
"""


def _train(folder: Path, disturb: bool) -> tuple[list[str], ExperimentRecord]:
    (folder / "code").mkdir(parents=True)
    trials = Path(__file__).parents[1] / "pytorch" / "trials.py"
    (folder / "code" / "trials.py").write_text(trials.read_text())
    (folder / "code" / "train.py").write_text(TRAINING)
    config = {
        "entrypoint": "python3 train.py",
        "hyperparameters": {"dropout": 0.5},
        "searcher": {"name": "single", "metric": "loss"},
        "data": {"disturb": disturb},
    }
    store = Store.open(folder / "home")
    record = store.create_experiment(read_experiment(config), "", folder / "code")
    states = []
    while not states or states[-1] == "PAUSED":
        states.append(Runner(store, record.id).run().state)
    return states, store.experiment(record.id)


@pytest.mark.torture
def test_a_killed_and_paused_training_reports_as_an_uninterrupted_one(tmp_path: Path) -> None:
    states, undisturbed = _train(tmp_path / "undisturbed", disturb=False)
    assert (states, undisturbed.trials[0].restarts) == (["COMPLETED"], 0)
    assert list(undisturbed.trials[0].values) == [4, 8, 12, 16, 18]
    states, disturbed = _train(tmp_path / "disturbed", disturb=True)
    trial = disturbed.trials[0]
    assert (states, trial.restarts) == (["PAUSED", "COMPLETED"], 1), (trial.directory / "log.txt").read_text()
    assert trial.values == undisturbed.trials[0].values
    starts = [line for line in (disturbed.directory / "runner.log").read_text().splitlines() if "starts" in line]
    assert ["the start" in line for line in starts] == [True, False, False]
