"""Experiments whose trials are small scripts without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.search.processes import LocalBackend
from dovetail.search.records import ExperimentRecord
from dovetail.search.runner import Runner
from dovetail.search.schema import read_experiment
from dovetail.search.store import Store

PRELUDE = """
import json, os, shutil, signal, sys, time
from pathlib import Path

info = json.loads(Path(os.environ["DOVETAIL_TRIAL"]).read_text())
folder, hparams = Path(info["directory"]), info["hparams"]
attempt = int(Path(os.environ["DOVETAIL_ATTEMPT"]).name)


def write(row):
    with open(folder / "metrics.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\\n")


def report(steps, loss, **more):
    write({"group": "validation", "steps_completed": steps, "metrics": {"loss": loss, "epochs": steps, **more}})


def wait():
    (folder / "is_waiting").touch()
    while True:
        time.sleep(0.01)


"""


@dataclass
class Lab:
    """A store, and what makes experiments in it."""

    folder: Path
    store: Store

    def create(self, script: str, searcher: str | dict[str, Any] = "single", **config: Any) -> ExperimentRecord:
        """Write an experiment down whose trials run a script."""
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        (code / "trial.py").write_text(PRELUDE + script)
        section = {"name": searcher} if isinstance(searcher, str) else searcher
        given = {"entrypoint": "python3 trial.py", "searcher": {"metric": "loss", **section}, **config}
        return self.store.create_experiment(read_experiment(given), yaml.safe_dump(given), code)

    def run(self, script: str, searcher: str | dict[str, Any] = "single", **config: Any) -> ExperimentRecord:
        """Run such an experiment to its end, two trials at a time at most."""
        record = self.create(script, searcher, **config)
        return Runner(self.store, record.id, LocalBackend(slots=2)).run()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A place for experiments."""
    return Lab(tmp_path, Store.open(tmp_path / "home"))


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """A function that waits for a condition, a minute at most."""
    import time

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "this never came to be"
            time.sleep(0.005)

    return wait
