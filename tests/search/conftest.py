"""Experiments whose trials are small scripts without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dovetail.info import ATTEMPT
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


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, two minutes at most."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "this never came to be"
        time.sleep(0.005)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """A function that waits for a condition, two minutes at most."""
    return wait_until


class Detached:
    """A runner or a job in a separate process and session."""

    def __init__(self, server: subprocess.Popen[str], words: Sequence[object], folder: Path) -> None:
        assert server.stdin is not None
        self._folder = folder
        print(json.dumps([[*map(str, words)], str(folder)]), file=server.stdin, flush=True)
        wait_until((folder / "pid").exists)
        self.pid = int((folder / "pid").read_text())

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        wait_until((self._folder / "code").exists)
        return int((self._folder / "code").read_text())

    def send_signal(self, number: int) -> None:
        """Let it have a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            if not (self._folder / "code").exists():
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait()


@pytest.fixture(scope="session")
def runner_server() -> Iterator[subprocess.Popen[str]]:
    """What `forked` starts its processes by."""
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("runner_server.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture
def forked(
    tmp_path: Path, runner_server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Detached]]:
    """A function that starts what `runner_server` knows by its words; none is left at the end."""
    started: list[Detached] = []

    def start(*words: object) -> Detached:
        started.append(Detached(runner_server, words, tmp_path_factory.mktemp("process")))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get(ATTEMPT, "").startswith(str(tmp_path)):
                each.kill()


@pytest.fixture
def detached(lab: Lab, forked: Callable[..., Detached]) -> Callable[[ExperimentRecord], Detached]:
    """A function that runs an experiment in a separate process; none is left at the end."""
    return lambda record: forked(lab.store.home, record.id)
