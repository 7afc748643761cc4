"""Samples of a running run: losses, gradient norm and use of the machine."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from counting import code_called

from dovetail.history import History
from dovetail.history import samples as module
from dovetail.history.journal import RunJournal, git_state
from dovetail.history.samples import Sampler, samples_path
from dovetail.trainers import Trainer
from dovetail.units import Epochs

X = torch.arange(48.0).reshape(24, 2) / 48
Y = torch.arange(24) % 2


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a sample at every report."""
    for name in ("FIRST", "SHORTEST", "_COST_FACTOR"):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(module, "_NUM_RECENT", math.inf)


def trainer(folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    options = {"batch_size": 3, "num_epochs": 2, "verbose": False, "print_every": 3, "shuffle": True, **options}
    model = torch.nn.Linear(2, 2)
    return Trainer(model, "cpu", train_dataset=(X, Y), checkpoint_dir=folder, gradient_clip=0.1, **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ck_samples.jsonl").read_text().splitlines()]


def windows(samples: list[dict[str, Any]], losses: array[float]) -> Iterator[float]:
    before = 0
    for each in samples:
        if each["batches"] > before:
            part = losses[before : each["batches"]]
            yield sum(part) / len(part)
        before = each["batches"]


@pytest.mark.usefixtures("always")
def test_a_sample_has_the_mean_loss_since_the_last_one_and_the_usage(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    history = run.fit()
    start, *samples = lines(tmp_path)
    assert start["batches"] == 0
    # Two reports inside of each epoch of 8 batches and one at its end, and one row per epoch.
    assert [each["batches"] for each in samples] == [3, 6, 8, 8, 11, 14, 16, 16]
    assert [each["loss"] for each in samples if "loss" in each] == list(windows(samples, history.losses))
    assert [each["updates"] for each in samples] == [each["batches"] for each in samples]
    assert all(each["gradient_norm"] > 0 and each["lr"] == 0.0001 for each in samples)
    assert all(each["memory"] > 1e7 and 0 < each["machine_memory"] < each["machine_total"] for each in samples)
    assert all(0 <= each["machine_cpu"] <= 100 <= 100 + each["cpu"] for each in samples)


@pytest.mark.usefixtures("always")
def test_samples_change_neither_weights_nor_history_nor_a_resume(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.fit()
    for length in (1, 2):
        resumed = trainer(tmp_path / "resumed")
        resumed.fit(max_length=Epochs(length), resume="auto")
    plain = trainer(tmp_path / "plain", save_hist=False)
    plain.fit()
    for other in (resumed, plain):
        assert other.context.history == whole.context.history
        assert torch.equal(other.context.model.weight, whole.context.model.weight)  # type: ignore[union-attr, arg-type]
    starts = [each for each in lines(tmp_path / "resumed") if "start" in each]
    assert [each["batches"] for each in starts] == [0, 8]
    trainer(tmp_path / "resumed").fit(max_length=Epochs(1))
    assert [each["batches"] for each in lines(tmp_path / "resumed") if "start" in each] == [0]


def test_a_report_without_a_sample_makes_no_further_python_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a sample is due if this takes five seconds.
    monkeypatch.setattr(module, "FIRST", math.inf)
    plain, sampled = History(), History()
    journal = RunJournal(tmp_path / "ck_run.jsonl")
    sampled.attach(tmp_path / "ck_history.jsonl", journal)
    journal.start({}, is_new=True)
    calls = [code_called(lambda it=it: it.extend_losses([1.0])) for it in (plain, sampled)]  # type: ignore[misc]
    assert calls[0] == calls[1]


def test_a_sample_takes_at_most_a_thousandth_of_the_time(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "ck_samples.jsonl")
    sampler.start(is_new=True)
    before = time.monotonic()
    sampler.sample(array("d"))
    after = time.monotonic()
    assert sampler.due >= after + module.SHORTEST - (after - before)
    sampler.start(is_new=True, probe=lambda: {"slow": sum(range(3_000_000))})
    before = time.thread_time()
    sampler.sample(array("d"))
    spent = time.thread_time() - before
    # The sample is most of this time.
    assert sampler.due - time.monotonic() > 500 * spent


def test_the_children_of_a_process_are_those_that_psutil_finds() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell:
        try:
            here = psutil.Process()
            while len(psutil.Process(shell.pid).children()) == 0:
                assert shell.poll() is None
            expected = here.children(recursive=True)
            assert {each.pid for each in module._descendants(here)} == {each.pid for each in expected}
            assert len(expected) >= 2
        finally:
            for each in psutil.Process(shell.pid).children():
                each.kill()
            shell.kill()


@pytest.mark.usefixtures("always")
def test_neither_a_failing_probe_nor_a_full_disk_stops_a_run(tmp_path: Path) -> None:
    def fail() -> dict[str, float]:
        raise RuntimeError("no")

    journal = RunJournal(tmp_path / "ck_run.jsonl")
    journal.start({}, is_new=True, probe=fail)
    journal.sampler.sample(array("d", [math.nan, 1.0]))
    assert lines(tmp_path)[-1]["loss"] == "NaN"
    copied = pickle.loads(pickle.dumps(journal.sampler))
    assert (copied.due, journal.sampler.due < math.inf) == (math.inf, True)
    journal.end("finished")
    assert journal.sampler.due == math.inf
    (tmp_path / "file").touch()
    blocked = RunJournal(tmp_path / "file" / "ck_run.jsonl")
    blocked.start({}, is_new=True)
    blocked.sampler.sample(array("d"))


@pytest.mark.usefixtures("always")
def test_half_a_line_of_a_killed_process_is_ended(tmp_path: Path) -> None:
    path = samples_path(tmp_path / "ck_run.jsonl")
    path.write_text('{"start": 1.0, "batches": 0}\n{"time": 2.0, "bat')
    sampler = Sampler(path)
    sampler.start(is_new=False, num_losses=4)
    sampler.sample(array("d", [1.0] * 6))
    found = path.read_text().splitlines()
    assert [json.loads(line).get("batches") for line in found[2:]] == [4, 6]


def git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=trunk"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, env=environment)


def test_the_git_state_has_commit_branch_and_uncommitted_changes(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"git": None, "branch": None, "dirty": None}
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "first")

    def state() -> tuple[Any, ...]:
        git_state.cache_clear()
        found = git_state(tmp_path)
        return len(found["git"]), found["branch"], found["dirty"]

    assert state() == (40, "trunk", False)
    (tmp_path / "new").touch()
    assert state() == (40, "trunk", False)
    (tmp_path / "a").write_text("2")
    assert state() == (40, "trunk", True)
    git(tmp_path, "checkout", "--detach")
    assert state() == (40, None, True)


def test_without_git_the_state_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init")
    (tmp_path / "a").touch()
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "first")
    monkeypatch.setenv("PATH", str(tmp_path))
    git_state.cache_clear()
    found = git_state(tmp_path)
    assert (len(found["git"]), found["branch"], found["dirty"]) == (40, None, None)
