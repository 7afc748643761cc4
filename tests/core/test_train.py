from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.core import METRICS, EarlyExitReason, TrainContext, read_metrics
from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.info import TrialInfo
from dovetail.search.reports import Reports


def rows(folder: Path) -> list[dict[str, Any]]:
    """The reports without their times."""
    return [{name: value for name, value in row.items() if name != "time"} for row in read_metrics(folder / METRICS)]


def test_every_report_is_a_line(tmp_path: Path) -> None:
    before = time.time()
    train = TrainContext(tmp_path / "trial")
    train.report_training_metrics(1, {"loss": 0.5})
    train.report_validation_metrics(2, {"accuracy": 1})
    train.report_metrics("inference", 3, {})
    train.report_progress(0.25)
    train.set_status("resting")
    train.report_early_exit(EarlyExitReason.INVALID_HP)
    assert rows(tmp_path / "trial") == [
        {"group": "training", "steps_completed": 1, "metrics": {"loss": 0.5}},
        {"group": "validation", "steps_completed": 2, "metrics": {"accuracy": 1}},
        {"group": "inference", "steps_completed": 3, "metrics": {}},
        {"progress": 0.25},
        {"status": "resting"},
        {"exited": "INVALID_HP"},
    ]
    times = [before, *(row["time"] for row in read_metrics(tmp_path / "trial" / METRICS)), time.time()]
    assert times == sorted(times)


def test_tensors_and_arrays_become_plain_values(tmp_path: Path) -> None:
    given = {
        "scalar": torch.tensor(0.5),
        "counts": torch.tensor([1, 2]),
        "numpy": np.float32(0.25),
        "array": np.array([[True]]),
        "nested": {"pair": (1, "a"), "none": None},
    }
    TrainContext(tmp_path).report_training_metrics(1, given)
    expected = {
        "scalar": 0.5,
        "counts": [1, 2],
        "numpy": 0.25,
        "array": [[True]],
        "nested": {"pair": [1, "a"], "none": None},
    }
    assert rows(tmp_path)[0]["metrics"] == expected


def test_values_that_are_not_finite_round_trip_as_strict_json(tmp_path: Path) -> None:
    values = {"up": math.inf, "down": -math.inf, "list": [torch.tensor(math.nan)]}
    TrainContext(tmp_path).report_training_metrics(1, values)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads((tmp_path / METRICS).read_text(), parse_constant=refuse)
    assert line["metrics"] == {"up": "Infinity", "down": "-Infinity", "list": ["NaN"]}
    found = rows(tmp_path)[0]["metrics"]
    assert (found["up"], found["down"]) == (math.inf, -math.inf)
    assert math.isnan(found["list"][0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("", 1, {}), "group: expected a name, got ''"),
        (("training", -1, {}), "steps_completed: expected a number of steps from 0 on, got -1"),
        (("training", 1.5, {}), "steps_completed: expected a number of steps from 0 on, got 1.5"),
        (("training", 1, [0.5]), "metrics: expected values by name, got list"),
        (("training", 1, {"all": [{1}]}), r"metrics.all\[0\]: cannot report a set \(accepted: numbers, tensors"),
        (("training", 1, {3: 1}), "metrics: expected names that are text, got 3"),
    ],
)
@pytest.mark.parametrize("is_chief", [True, False])
def test_values_that_cannot_be_reported_raise_in_every_process(
    tmp_path: Path, arguments: Any, sentence: str, is_chief: bool
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TrainContext(tmp_path, is_chief=is_chief).report_metrics(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("progress", [-0.1, 1.1, math.nan])
def test_progress_is_between_zero_and_one(tmp_path: Path, progress: float) -> None:
    with pytest.raises(ConfigError, match="progress: expected a number from 0 to 1"):
        TrainContext(tmp_path).report_progress(progress)


def test_only_the_chief_writes(tmp_path: Path) -> None:
    train = TrainContext(tmp_path / "trial", is_chief=False)
    train.report_training_metrics(1, {"loss": 0.5})
    train.report_progress(1)
    train.set_status("resting")
    train.report_early_exit(EarlyExitReason.USER_REQUESTED_STOP)
    assert not (tmp_path / "trial").exists()


def test_reports_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dovetail.core"):
        TrainContext(tmp_path).report_validation_metrics(7, {"loss": 0.5, "accuracy": 1})
    assert caplog.messages == ["validation metrics at step 7: loss 0.5, accuracy 1"]


def test_an_unfinished_line_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    TrainContext(tmp_path).report_progress(0.5)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"group": "train')
    assert rows(tmp_path) == [{"progress": 0.5}]
    TrainContext(tmp_path).report_progress(1)
    assert rows(tmp_path) == [{"progress": 0.5}, {"progress": 1.0}]


@pytest.mark.parametrize(
    ("line", "sentence"), [("{", "not valid JSON"), ("[]", "expected a report with"), ('{"a": 1}', "expected a report")]
)
def test_a_damaged_report_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    TrainContext(tmp_path).report_progress(0.5)
    with (tmp_path / METRICS).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=rf"metrics\.jsonl:2: {sentence}"):
        read_metrics(tmp_path / METRICS)


_WRITER = """
import itertools, sys
from dovetail.core import TrainContext
train = TrainContext(sys.argv[1])
for step in itertools.count():
    train.report_training_metrics(step, {"loss": 1 / (step + 1), "filling": "x" * 5000})
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_a_reader_never_sees_half_a_line_and_a_kill_loses_at_most_one(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)]) as writer:
        try:
            deadline = time.monotonic() + 120
            num_seen = 0
            while num_seen < 200:
                assert time.monotonic() < deadline
                if (tmp_path / METRICS).exists():
                    seen = [row["steps_completed"] for row in read_metrics(tmp_path / METRICS)]
                    assert seen == list(range(len(seen)))
                    num_seen = len(seen)
        finally:
            os.kill(writer.pid, signal.SIGKILL)
    seen = [row["steps_completed"] for row in read_metrics(tmp_path / METRICS)]
    assert seen == list(range(len(seen)))


def reported(folder: Path, config: dict[str, Any]) -> TrainContext:
    train = TrainContext(folder, info=TrialInfo(trial_id=1, config=config))
    train.report_training_metrics(1, {"loss": 0.01})
    for step, loss in enumerate([0.5, 0.2, math.nan, 0.3]):
        train.report_validation_metrics(step, {"loss": loss})
    return train


@pytest.mark.parametrize(
    ("searcher", "best"),
    [
        ({"metric": "loss"}, 0.2),
        ({"metric": "loss", "smaller_is_better": False}, 0.5),
        ({"metric": "accuracy"}, None),
        ({}, None),
    ],
)
def test_the_best_validation_uses_the_searcher_metric(
    tmp_path: Path, searcher: dict[str, Any], best: float | None
) -> None:
    assert reported(tmp_path, {"searcher": searcher}).get_experiment_best_validation() == best


def test_without_a_searcher_or_report_there_is_no_best_validation(tmp_path: Path) -> None:
    assert reported(tmp_path, {}).get_experiment_best_validation() is None
    info = TrialInfo(trial_id=1, config={"searcher": {"metric": "loss"}})
    assert TrainContext(tmp_path / "new", info=info).get_experiment_best_validation() is None


def test_the_context_provides_a_tensorboard_folder(tmp_path: Path) -> None:
    path = TrainContext(tmp_path / "trial").get_tensorboard_path()
    assert path == tmp_path / "trial" / "tensorboard"
    assert path.is_dir()


def test_the_metrics_of_batches_are_recorded_beside_their_mean(tmp_path: Path) -> None:
    train = TrainContext(tmp_path)
    train.report_training_metrics(2, {"loss": 1.5}, batch_metrics=[{"loss": torch.tensor(1.0)}, {"loss": math.inf}])
    assert rows(tmp_path) == [
        {
            "group": "training",
            "steps_completed": 2,
            "metrics": {"loss": 1.5},
            "batch_metrics": [{"loss": 1.0}, {"loss": math.inf}],
        }
    ]
    with pytest.raises(ConfigError, match="batch_metrics: expected values by name, got float"):
        train.report_training_metrics(3, {"loss": 1.5}, batch_metrics=[1.0])  # type: ignore[list-item]  # the mistake


@pytest.mark.parametrize(("level", "number"), [("debug", 10), ("info", 20), (None, 20), ("warn", 30), ("error", 40)])
def test_an_alert_is_logged_and_recorded(
    level: Any, number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "dovetail.core")
    TrainContext(tmp_path).alert(title="slow", description="one batch took 90 s", level=level)
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (number, "alert: slow: one batch took 90 s")
    ]
    expected = {"title": "slow", "description": "one batch took 90 s", "level": level or "info"}
    assert rows(tmp_path) == [{"alert": expected}]


def test_an_alert_of_another_process_is_always_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TrainContext(tmp_path, is_chief=False).alert("slow", level="debug")
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.WARNING, "alert: slow")]
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_alert_level_raises_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown level of an alert 'warning': did you mean 'warn'"):
        TrainContext(tmp_path).alert("slow", level="warning")  # type: ignore[arg-type]  # the mistake


def test_the_last_metadata_replace_earlier_ones_and_are_stored(tmp_path: Path) -> None:
    train = TrainContext(tmp_path)
    assert train.get_metadata() is None
    assert train.set_metadata({"dataset": "digits", "version": 1}) == {"dataset": "digits", "version": 1}
    assert train.set_metadata({"size": np.int64(3), "limit": math.inf})["size"] == 3
    train.report_progress(0.5)
    assert TrainContext(tmp_path).get_metadata() == {"size": 3, "limit": math.inf}
    with pytest.raises(ConfigError, match="metadata: expected values by name, got list"):
        train.set_metadata([])  # type: ignore[arg-type]  # the mistake


def test_tensorboard_files_need_no_upload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dovetail.core")
    train = TrainContext(tmp_path)
    train.upload_tensorboard_files()
    assert caplog.messages == [f"the TensorBoard files are in {tmp_path / 'tensorboard'}"]
    with pytest.raises(ConfigError, match="expected neither a selector nor a mangler"):
        train.upload_tensorboard_files(mangler=lambda path, rank: path)


def test_the_runner_of_an_experiment_accepts_every_report(tmp_path: Path) -> None:
    train = TrainContext(tmp_path)
    train.alert("slow")
    train.set_metadata({"dataset": "digits"})
    train.report_training_metrics(1, {"loss": 1.0}, [{"loss": 1.0}])
    reports = Reports(tmp_path / METRICS)
    assert (len(list(reports.read())), reports.rejected) == (3, [])
