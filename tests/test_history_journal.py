"""The journal of a run, and the state that it shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dovetail.history import journal as journals
from dovetail.history.journal import PATIENCE, JournalReader, RunJournal, git_commit, journal_path
from dovetail.trainers import Trainer
from dovetail.units import Epochs

X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([0, 1, 0, 1, 0, 1])


def trainer(folder: Path, model: torch.nn.Module | None = None) -> Trainer:
    options: dict[str, Any] = {"checkpoint_dir": folder, "batch_size": 3, "num_epochs": 2, "verbose": False}
    return Trainer(model or torch.nn.Linear(2, 2), "cpu", train_dataset=(X, Y), val_dataset=(X, Y), **options)


def read(folder: Path) -> JournalReader:
    reader = JournalReader(folder / "ck_run.jsonl")
    reader.update()
    return reader


def test_a_finished_run_has_settings_process_and_a_time_per_row(tmp_path: Path) -> None:
    before = time.time()
    run = trainer(tmp_path)
    history = run.fit()
    found = read(tmp_path)
    assert found.state() == "finished"
    assert list(found.times) == list(range(1, len(history) + 1))
    assert before - 1 < found.start["start"] <= found.times[1] <= found.times[4] <= found.end["end"] < time.time() + 1
    assert (found.settings["batch_size"], found.settings["optimizer"]) == (3, "Adam")
    assert (found.start["pid"], found.start["versions"]["torch"]) == (os.getpid(), torch.__version__)
    assert found.start["explain"].startswith("Trainer\n")


def test_a_failed_run_has_the_first_line_of_its_error(tmp_path: Path) -> None:
    class Broken(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of paper\nsecond line")

    with pytest.raises(RuntimeError, match="out of paper"):
        trainer(tmp_path, Broken(2, 2)).fit()
    found = read(tmp_path)
    assert (found.state(), found.end["error"]) == ("failed", "RuntimeError: out of paper")


def test_a_resumed_run_has_two_starts_and_one_end(tmp_path: Path) -> None:
    trainer(tmp_path).fit(max_length=Epochs(1))
    first = read(tmp_path)
    trainer(tmp_path).fit(max_length=Epochs(2), resume="auto")
    found = read(tmp_path)
    assert (first.num_starts, found.num_starts, found.state()) == (1, 2, "finished")
    assert (found.first_start, list(found.times)) == (first.start["start"], [1, 2, 3, 4])


def test_a_new_run_in_the_same_folder_replaces_the_journal(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    trainer(tmp_path).fit()
    assert read(tmp_path).num_starts == 1


def test_a_killed_process_is_killed_and_a_living_one_is_running(tmp_path: Path) -> None:
    path = tmp_path / "ck_run.jsonl"
    code = f"import time; from pathlib import Path; from dovetail.history.journal import RunJournal as J; " \
           f"J(Path({str(path)!r})).start({{}}, is_new=True); print(flush=True); time.sleep(600)"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    found = read(tmp_path)
    assert found.state() == "running"
    process.send_signal(signal.SIGKILL)
    # A zombie process counts as ended, too.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.pid_exists(process.pid)
    assert found.state() == "killed"
    process.communicate()
    assert found.state() == "killed"


def test_a_run_on_another_machine_is_killed_after_a_long_silence(tmp_path: Path) -> None:
    RunJournal(tmp_path / "ck_run.jsonl").start({}, is_new=True)
    found = read(tmp_path)
    found.start["host"] = "elsewhere"
    started = found.start["start"]
    assert found.state(started + PATIENCE - 1) == "running"
    assert found.state(started + PATIENCE + 1) == "killed"
    # Its rows are an hour apart.
    found.times = {1: started + 3600}
    assert found.state(started + 4 * 3600) == "running"
    assert found.state(started + 7 * 3600) == "killed"


def test_half_a_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "ck_run.jsonl"
    RunJournal(path).start({}, is_new=True)
    found = read(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"rows": 1, "ti')
    assert (found.update(), found.times) == (False, {})
    with path.open("ab") as file:
        file.write(b'me": 5.0}\n[]\nnonsense\n')
    assert (found.update(), found.times) == (True, {1: 5.0})
    assert found.update() is False


def test_a_start_after_half_a_line_is_a_separate_line(tmp_path: Path) -> None:
    path = tmp_path / "ck_run.jsonl"
    RunJournal(path).start({}, is_new=True)
    with path.open("ab") as file:
        file.write(b'{"rows": 1, "ti')
    RunJournal(path).start({"settings": {"lr": float("inf")}}, is_new=False)
    found = read(tmp_path)
    assert (found.num_starts, found.settings) == (2, {"lr": "Infinity"})


def test_a_file_that_is_cut_or_removed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "ck_run.jsonl"
    RunJournal(path).start({}, is_new=True)
    RunJournal(path).end("finished")
    found = read(tmp_path)
    path.write_text(json.dumps({"start": 1.0}) + "\n")
    assert (found.update(), found.start, found.end) == (True, {"start": 1.0}, {})
    path.unlink()
    assert (found.update(), found.state()) == (True, "unknown")


def test_a_disk_that_cannot_be_written_does_not_stop_a_run(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path / "a-file" / "ck_run.jsonl")
    (tmp_path / "a-file").touch()
    journal.start({}, is_new=True)
    journal.mark(1)
    journal.end("finished")
    assert [each.name for each in tmp_path.iterdir()] == ["a-file"]


def test_the_commit_is_read_without_git(tmp_path: Path) -> None:
    assert git_commit(tmp_path / "no-repository") is None
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n" + "a" * 40 + " refs/heads/main\n")
    assert git_commit(tmp_path) == "a" * 40
    (git / "refs" / "heads" / "main").write_text("b" * 40 + "\n")
    assert git_commit(tmp_path) == "b" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert git_commit(tmp_path / "folder") == "c" * 40
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / ".git").write_text(f"gitdir: {git}\n")
    assert git_commit(tmp_path / "tree") == "c" * 40


def test_the_journal_of_a_history_has_its_name() -> None:
    assert journal_path(Path("a", "history.jsonl")) == Path("a", "history_run.jsonl")
    assert journals.VERSION == 1
