from __future__ import annotations

import copy
import math
import random
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.callbacks import LambdaCallback
from dovetail.errors import ConfigError
from dovetail.tracking import Histogram, Run, Tracker, TrackioLogger
from dovetail.units import Epochs


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Trackio, which the package reads once, when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        utils = pytest.importorskip("trackio.utils")
    return Path(utils.TRACKIO_DIR)


@pytest.fixture
def project(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A project for one test. Environment variables request a network that no test may use."""
    monkeypatch.setenv("TRACKIO_SPACE_ID", "team/space")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9/?write_token=x")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    requests: list[Any] = []

    def refuse(*request: Any, **_: Any) -> None:
        requests.append(request)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield tmp_path.name
    assert requests == []


class Read:
    """A run, read from the SQLite file."""

    def __init__(self, folder: Path, project: str, name: str | None = None) -> None:
        trackio = pytest.importorskip("trackio")
        runs = list(trackio.Api().runs(project))
        (self.run,) = runs if name is None else [run for run in runs if run.name == name]
        self.statuses = [(alert["title"], alert["level"]) for alert in self.run.alerts()]
        storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
        self.rows = storage.get_logs(project, run_id=self.run.id)
        with sqlite3.connect(folder / f"{project}.db") as file:
            (count,) = file.execute("SELECT COUNT(*) FROM metrics WHERE run_id = ?", (self.run.id,)).fetchone()
        file.close()
        assert count == len(self.rows)

    def series(self, name: str) -> list[tuple[int, Any]]:
        return [(row["step"], row[name]) for row in self.rows if name in row]


def test_the_logged_metrics_equal_the_history(folder: Path, project: str, make: Callable[..., Any]) -> None:
    tracker = Tracker(TrackioLogger(project, name="first", group="g"), hyperparameters={"token": "hunter2", "_x": 1})
    trainer = make(tracker)
    history = trainer.fit(max_length=Epochs(2))
    run = Read(folder, project)
    for name in ("train_loss", "valid_loss"):
        assert run.series(name) == list(zip([5, 10], history.get_metric_values(name), strict=True))
    assert (run.run.name, run.run.id, run.statuses) == ("first", trainer.context.run.id, [("finished", "info")])
    config = run.run.config
    assert (config["optimizer.lr"], config["token"], config["-_x"], config["_Group"]) == (0.1, "***", 1, "g")
    assert config["_Username"] is None


def test_histograms_and_figures_are_the_types_of_trackio(folder: Path, project: str, figure: Any) -> None:
    logger = TrackioLogger(project)
    logger.start(Run("a"))
    logger.log({"weights/w": Histogram([0.0, 1.0, 1.0, 4.0], bins=2), "confusion": figure, "nan": math.nan}, 7)
    logger.finish("failed")
    run = Read(folder, project)
    ((_, histogram),) = run.series("weights/w")
    assert (histogram["values"], histogram["bins"]) == ([3, 1], [0.0, 2.0, 4.0])
    ((step, image),) = run.series("confusion")
    assert step == 7
    assert (folder / "media" / image["file_path"]).read_bytes().startswith(b"\x89PNG")
    ((_, number),) = run.series("nan")
    assert math.isnan(number)
    assert run.statuses == [("failed", "error")]


def test_a_resumed_run_continues_and_nothing_appears_twice(
    folder: Path, project: str, make: Callable[..., Any]
) -> None:
    states: list[Any] = []
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    # The first process trains for two epochs, and the second one resumes after the first epoch.
    first = make(Tracker(TrackioLogger(project)), keep).fit(max_length=Epochs(2))
    trainer = make(Tracker(TrackioLogger(project)))
    trainer.load_state_dict(states[0])
    history = trainer.fit(max_length=Epochs(3))
    run = Read(folder, project)
    assert run.run.id == trainer.context.run.id
    expected = list(zip([5, 10, 15], history.get_metric_values("train_loss"), strict=True))
    assert run.series("train_loss") == expected
    assert expected[:2] == list(zip([5, 10], first.get_metric_values("train_loss"), strict=True))
    assert run.statuses.count(("finished", "info")) == 2


def test_two_trackers_have_one_run_each(folder: Path, project: str) -> None:
    first, second = TrackioLogger(project), TrackioLogger(project)
    first.start(Run("a"))
    second.start(Run("b"))
    first.log({"x": 1.0}, 1)
    second.log({"x": 2.0}, 1)
    first.finish("finished")
    second.finish("finished")
    assert [Read(folder, project, name).series("x") for name in "ab"] == [[(1, 1.0)], [(1, 2.0)]]


def test_the_trackio_logger_prints_nothing_and_draws_no_random_numbers(
    project: str, make: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    make().fit(max_length=Epochs(1))
    alone = random.getstate(), torch.get_rng_state().tolist()
    make(Tracker(TrackioLogger(project))).fit(max_length=Epochs(1))
    assert capfd.readouterr() == ("", "")
    assert (random.getstate(), torch.get_rng_state().tolist()) == alone


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden"])
def test_a_name_that_would_leave_the_folder_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="TrackioLogger: project: expected letters, digits"):
        TrackioLogger(name)
    with pytest.raises(ConfigError, match="TrackioLogger: name: expected letters, digits"):
        TrackioLogger("digits", name)
