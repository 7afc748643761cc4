from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from dovetail.callbacks import LambdaCallback
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.tracking import FolderLogger, Histogram, Run, Tracker
from dovetail.units import Epochs

FORMATS = pytest.mark.parametrize("format", ["csv", "jsonl"])


def read(logger: Any) -> list[tuple[int, str, float]]:
    """Every number of a run: (step, name, value)."""
    if logger.format == "csv":
        with (logger.path / "metrics.csv").open(newline="") as file:
            return [(int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]
    rows = map(json.loads, (logger.path / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], name, float(value)) for row in rows for name, value in row.items() if name != "step"]


@FORMATS
def test_the_logged_metrics_equal_the_history(
    make: Callable[..., Any], tmp_path: Path, format: Literal["csv", "jsonl"]
) -> None:
    logger = FolderLogger(tmp_path / "new", format)
    history = make(Tracker(logger)).fit(max_length=Epochs(2))
    rows = read(logger)
    for metric in ("train_loss", "valid_loss"):
        values = [(step, value) for step, name, value in rows if name == metric]
        assert values == list(zip([5, 10], history.get_metric_values(metric), strict=True))


@FORMATS
@pytest.mark.parametrize("cut", [1, 2])
def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(
    make: Callable[..., Any], tmp_path: Path, format: Literal["csv", "jsonl"], cut: Any
) -> None:
    straight, cut_off, resumed = (FolderLogger(tmp_path / name, format) for name in ("straight", "cut", "cut"))
    make(Tracker(straight, histograms_every=2)).fit(max_length=Epochs(3))
    states = []
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    make(Tracker(cut_off, histograms_every=2), keep).fit(max_length=Epochs(3))
    trainer = make(Tracker(resumed, histograms_every=2))
    trainer.load_state_dict(states[cut - 1])
    trainer.fit(max_length=Epochs(3))
    assert resumed.path == cut_off.path
    for name in (f"metrics.{format}", "histograms.jsonl"):
        assert (resumed.path / name).read_bytes() == (straight.path / name).read_bytes()


@FORMATS
def test_an_incomplete_line_of_a_killed_process_is_removed(tmp_path: Path, format: Literal["csv", "jsonl"]) -> None:
    logger = FolderLogger(tmp_path, format)
    logger.start(Run("a"))
    logger.log({"x": 1.0}, 1)
    with (logger.path / f"metrics.{format}").open("a") as file:
        file.write("1" if format == "csv" else '{"step": 1, "x"')
    logger.start(Run("a", step=1))
    assert read(logger) == [(1, "x", 1.0)]


@FORMATS
def test_numbers_that_are_not_finite_are_kept(tmp_path: Path, format: Literal["csv", "jsonl"]) -> None:
    logger = FolderLogger(tmp_path, format)
    logger.start(Run("a", hyperparameters={"limit": math.inf}))
    logger.log({"x": math.nan, "y": -math.inf}, 1)
    logger.finish("finished")
    (_, _, x), (_, _, y) = read(logger)
    assert math.isnan(x)
    assert y == -math.inf
    assert json.loads((logger.path / "run.json").read_text())["hyperparameters"] == {"limit": "Infinity"}


def test_the_run_file_has_the_status_and_the_hyperparameters(make: Callable[..., Any], tmp_path: Path) -> None:
    logger = FolderLogger(tmp_path)
    make(Tracker(logger, hyperparameters={"api_key": "hunter2"})).fit(max_length=Epochs(1))
    run = json.loads((logger.path / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["hyperparameters"]["optimizer.lr"] == 0.1
    assert run["hyperparameters"]["api_key"] == "***"
    assert "hunter2" not in "".join(path.read_text() for path in logger.path.iterdir())


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_the_status_is_running_until_the_end(tmp_path: Path, status: Any) -> None:
    logger = FolderLogger(tmp_path)
    logger.start(Run("a"))
    assert json.loads((logger.path / "run.json").read_text())["status"] == "running"
    logger.finish(status)
    assert json.loads((logger.path / "run.json").read_text())["status"] == status


def test_histograms_have_counts_and_edges(tmp_path: Path) -> None:
    logger = FolderLogger(tmp_path)
    logger.start(Run("a"))
    logger.log({"weights/w": Histogram([0.0, 1.0, 1.0, 4.0], bins=2)}, 7)
    assert json.loads((logger.path / "histograms.jsonl").read_text()) == {
        "step": 7,
        "weights/w": {"counts": [3, 1], "edges": [0.0, 2.0, 4.0]},
    }


def test_a_figure_is_stored_as_an_image_of_its_step(tmp_path: Path, figure: Any) -> None:
    logger = FolderLogger(tmp_path)
    logger.start(Run("a"))
    logger.log({"valid/confusion": figure}, 7)
    assert (logger.path / "figures/valid/confusion/7.png").read_bytes().startswith(b"\x89PNG")


def test_every_run_has_a_separate_folder(make: Callable[..., Any], tmp_path: Path) -> None:
    paths = []
    for _ in range(2):
        logger = FolderLogger(tmp_path, label="digits")
        make(Tracker(logger)).fit(max_length=Epochs(1))
        paths.append(logger.path)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert all(path.name.startswith("digits-") for path in paths)


def test_the_file_logger_rejects_invalid_arguments_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'jsonl'"):
        FolderLogger(tmp_path, "json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="label: expected one name"):
        FolderLogger(tmp_path, label="a/b")
    with pytest.raises(ConfigError, match="expected a name"):
        FolderLogger(tmp_path, label="..")
    with pytest.raises(ConfigError, match="has no folder yet"):
        _ = FolderLogger(tmp_path).path


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_a_damaged_line_does_not_disable_the_logger(
    make: Callable[..., Any], tmp_path: Path, format: Literal["csv", "jsonl"]
) -> None:
    logger = FolderLogger(tmp_path / "runs", format)
    trainer = make(Tracker(logger))
    trainer.fit(max_length=Epochs(1))
    path = trainer.save_checkpoint(tmp_path / "ck")
    metrics = logger.path / f"metrics.{format}"
    whole = metrics.read_bytes()
    head, _, rest = whole.partition(b"\n")
    metrics.write_bytes(head + b"\n\xff[[[\n" + rest)
    with pytest.warns(UserWarning, match=rf"metrics\.{format} has damaged lines.*kept as metrics\.{format}\.damaged-"):
        make(Tracker(FolderLogger(tmp_path / "runs", format))).fit(max_length=Epochs(2), resume=path)
    assert metrics.read_bytes().startswith(whole)
    assert len(metrics.read_bytes()) > len(whole)
    (aside,) = logger.path.glob(f"metrics.{format}.damaged-*")
    assert b"\xff[[[" in aside.read_bytes()
