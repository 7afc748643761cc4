from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# A trial that needs no torch: it writes what the library's trials write.
TRAIN = """
import json, os, sys, time

info = json.load(open(os.environ["DOVETAIL_TRIAL"]))
print("trial", info["trial_id"], "test" if "DOVETAIL_TEST_MODE" in os.environ else "", flush=True)
hparams, data = info["hparams"], info["user_data"]
if hparams["width"] in data.get("fails", []):
    sys.exit("this width is too much")
while data.get("waits") and not os.path.exists(data["waits"]):
    time.sleep(0.02)
with open(os.path.join(info["directory"], "metrics.jsonl"), "a") as file:
    for epoch in (1, 2):
        for group, name in (("training", "loss"), ("validation", "validation_loss")):
            metrics = {name: hparams["learning_rate"] * hparams["width"] / epoch, "epochs": epoch}
            file.write(json.dumps({"group": group, "steps_completed": 10 * epoch, "metrics": metrics}) + "\\n")
"""

CONFIG = """
name: demo
description: A [bold] search
entrypoint: python3 train.py
hyperparameters:
  learning_rate: {type: double, minval: 0.25, maxval: 0.5, count: 2}
  width: {type: categorical, vals: [2, 4]}
  batch_size: 8
searcher: {name: grid, metric: validation_loss}
max_restarts: 0
"""


@dataclass(frozen=True)
class Project:
    """A folder with code, a configuration, and a home for experiments."""

    folder: Path

    @property
    def code(self) -> Path:
        return self.folder / "code"

    @property
    def config(self) -> Path:
        return self.folder / "demo.yaml"

    @property
    def home(self) -> Path:
        return self.folder / "home"


def make_project(folder: Path) -> Project:
    project = Project(folder)
    project.code.mkdir()
    (project.code / "train.py").write_text(TRAIN)
    project.config.write_text(CONFIG)
    return project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with experiment 1, whose four trials are completed. Tests only read it."""
    from dovetail.search.runner import Runner
    from dovetail.search.schema import read_experiment
    from dovetail.search.store import Store

    project = make_project(tmp_path_factory.mktemp("finished"))
    store = Store.open(project.home)
    record = store.create_experiment(read_experiment(project.config), CONFIG, project.code)
    assert Runner(store, record.id).run().state == "COMPLETED"
    return project


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Call the command line in this process and return its exit code, stdout and stderr."""
    from dovetail.cli import main

    monkeypatch.delenv("DOVETAIL_HOME", raising=False)
    monkeypatch.delenv("DOVETAIL_STORE", raising=False)

    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["dovetail", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            main()
        return leaving.value.code, *capsys.readouterr()

    return call
