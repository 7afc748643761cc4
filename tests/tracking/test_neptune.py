from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.callbacks import LambdaCallback
from dovetail.errors import ConfigError
from dovetail.tracking import Histogram, NeptuneLogger, Run, Tracker
from dovetail.units import Epochs

pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver is deprecated:DeprecationWarning")


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Read]]:
    """Reads every offline run back from the queue of its operations, the oldest first."""
    pytest.importorskip("neptune", reason="neptune is not installed; its boto3 needs python-dateutil below 3")
    monkeypatch.chdir(tmp_path)

    def read() -> list[Read]:
        folders = sorted((tmp_path / ".neptune" / "offline").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
        return [Read(folder) for folder in folders]

    return read


class Read:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fields: dict[str, Any] = {}
        self.series: dict[str, Any] = {}
        self.files: dict[str, Any] = {}
        decoder = json.JSONDecoder()
        text = "".join(path.read_text() for path in sorted(folder.glob("data-*.log")))
        while text := text.lstrip():
            entry, end = decoder.raw_decode(text)
            text = text[end:]
            self.take(entry["obj"])

    def take(self, operation: Any) -> None:
        name, kind = "/".join(operation["path"]), operation["type"]
        if kind.startswith("Assign"):
            self.fields[name] = operation["value"]
        elif kind.startswith("Log"):
            points = [(int(value["step"]), value["value"]) for value in operation["values"]]
            self.series.setdefault(name, []).extend(points)
        elif kind.startswith("UploadFile") and name != "source_code/files":
            self.files[name] = operation


def test_the_logged_metrics_equal_the_history(read: Callable[..., Any], make: Callable[..., Any]) -> None:
    history = make(Tracker(NeptuneLogger(mode="offline"))).fit(max_length=Epochs(2))
    (run,) = read()
    for name in ("train_loss", "valid_loss"):
        assert run.series[name] == list(zip([5, 10], history.get_metric_values(name), strict=True))
    assert run.fields["sys/failed"] is False


def test_the_hyperparameters_are_neptune_fields(read: Callable[..., Any], make: Callable[..., Any]) -> None:
    tracker = Tracker(NeptuneLogger(mode="offline", name="first"), hyperparameters={"token": "hunter2", "none": None})
    make(tracker).fit(max_length=Epochs(1))
    (run,) = read()
    assert run.fields["sys/name"] == "first"
    assert run.fields["hyperparameters/optimizer.lr"] == 0.1
    assert run.fields["hyperparameters/token"] == "***"
    assert run.fields["hyperparameters/none"] == "None"


def test_an_interrupted_run_has_the_status_failed(read: Callable[..., Any]) -> None:
    logger = NeptuneLogger(mode="offline")
    logger.start(Run("a"))
    logger.finish("failed")
    assert read()[0].fields["sys/failed"] is True


def test_histograms_and_figures_are_files(read: Callable[..., Any], figure: Any) -> None:
    logger = NeptuneLogger(mode="offline")
    logger.start(Run("a"))
    logger.log({"weights/w": Histogram([0.0, 1.0, 1.0, 4.0], bins=2), "confusion": figure}, 7)
    logger.finish("finished")
    (run,) = read()
    ((step, image),) = run.series["confusion"]
    assert step == 7
    assert image["data"].startswith("iVBOR")
    upload = run.files["weights/w/7"]
    content = next(run.folder.rglob(upload["tmp_file_name"])).read_text()
    assert json.loads(content) == {"counts": [3, 1], "edges": [0.0, 2.0, 4.0]}


def test_numbers_that_neptune_rejects_are_left_out(read: Callable[..., Any]) -> None:
    logger = NeptuneLogger(mode="offline")
    logger.start(Run("a"))
    logger.log({"x": math.nan, "y": math.inf, "z": 1.0}, 1)
    logger.finish("finished")
    assert read()[0].series == {"z": [(1, 1.0)]}


def test_a_resumed_run_continues_the_neptune_run(read: Callable[..., Any], make: Callable[..., Any]) -> None:
    states = []
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    make(Tracker(NeptuneLogger(mode="offline")), keep).fit(max_length=Epochs(1))
    trainer = make(Tracker(NeptuneLogger(mode="offline")))
    trainer.load_state_dict(states[0])
    trainer.fit(max_length=Epochs(2))
    assert [step for run in read() for step, _ in run.series["train_loss"]] == [5, 10]


@pytest.mark.usefixtures("read")
def test_an_invalid_token_does_not_stop_training(make: Callable[..., Any]) -> None:
    trainer = make(Tracker(NeptuneLogger("team/digits", api_token="wrong", mode="async")))
    with pytest.warns(UserWarning, match="NeptuneLogger") as reported:
        trainer.fit(max_length=Epochs(1))
    closed, failed = (str(each.message) for each in reported)
    assert "mode 'async' needs a server of your own, because Neptune's service closed in March 2026" in closed
    assert "The provided API token is invalid." in failed
    assert trainer.context.progress.epoch == 1


@pytest.mark.usefixtures("read")
def test_the_neptune_logger_prints_nothing(make: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    make(Tracker(NeptuneLogger(mode="offline"))).fit(max_length=Epochs(1))
    assert capfd.readouterr() == ("", "")


def test_values_derived_from_the_run_are_not_options() -> None:
    with pytest.raises(ConfigError, match="NeptuneLogger: with_id is set by the run"):
        NeptuneLogger("digits", with_id="a")
