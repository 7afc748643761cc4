from __future__ import annotations

import copy
import http.server
import json
import os
import random
import socket
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run

from dovetail.callbacks import LambdaCallback
from dovetail.errors import ConfigError, MissingExtraError
from dovetail.tracking import CometLogger, Histogram, Run, Tracker
from dovetail.units import Epochs

KEY = "hunter2hunter2hunter2hunter2"


@pytest.fixture
def comet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Skips without the package; the environment has a key, and no file of settings is read."""
    if find_spec("comet_ml") is None:
        pytest.skip("NOT TESTED: comet_ml is not installed, make install")
    # Comet's package imports jsonschema, which builds a grammar that takes two seconds, if this package is installed.
    monkeypatch.setitem(sys.modules, "rfc3987_syntax", None)
    monkeypatch.setenv("COMET_API_KEY", KEY)
    monkeypatch.setenv("COMET_START_ONLINE", "true")
    monkeypatch.setenv("COMET_CONFIG", str(tmp_path / "none"))


@pytest.fixture
def folder(comet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for archives. No test that has it may use the network."""
    requests: list[Any] = []

    def refuse(*request: Any, **_: Any) -> None:
        requests.append(request)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield tmp_path / "new" / "runs"
    assert requests == []


class Read:
    """An archive, whose messages must have the form that `comet upload` accepts."""

    def __init__(self, path: Path) -> None:
        schemas = pytest.importorskip("comet_ml.schemas")
        validators = {
            "metric_msg": schemas.get_metric_msg_validator(),
            "parameter_msg": schemas.get_parameter_msg_validator(),
            "log_other": schemas.get_log_other_msg_validator(),
            "file_upload": schemas.get_upload_msg_validator(),
        }
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist()}
        self.about = json.loads(self.files["experiment.json"])
        schemas.get_experiment_file_validator().validate(self.about)
        self.rows: list[tuple[str, int, Any]] = []
        self.parameters: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self.uploads: dict[str, tuple[int, bytes]] = {}
        for message in map(json.loads, self.files["messages.json"].splitlines()):
            kind, payload = message["type"], message["payload"]
            validators[kind].validate(payload)
            if kind == "metric_msg":
                metric = payload["metric"]
                self.rows.append((metric["metricName"], metric["step"], metric["metricValue"]))
            elif kind == "parameter_msg":
                self.parameters[payload["param"]["paramName"]] = payload["param"]["paramValue"]
            elif kind == "log_other":
                self.others[payload["key"]] = payload["value"]
            else:
                about = payload["additional_params"]
                name = about.get("fileName") or about["figName"]
                self.uploads[name] = about["step"], self.files[payload["file_path"]]

    def series(self, wanted: str) -> list[tuple[int, Any]]:
        return [(step, value) for name, step, value in self.rows if name == wanted]


def read(folder: Path) -> list[Read]:
    """Read every archive, the oldest first."""
    return sorted(map(Read, folder.glob("*.zip")), key=lambda found: found.about["start_time"])


def test_the_logged_metrics_equal_the_history(folder: Path, make: Callable[..., Any]) -> None:
    logger = CometLogger("digits", folder=folder, workspace="team", name="first", tags=["a"])
    tracker = Tracker(logger, hyperparameters={"token": "hunter2", "none": None})
    history = make(tracker).fit(max_length=Epochs(2))
    (run,) = read(folder)
    for name in ("train_loss", "valid_loss"):
        assert run.series(name) == list(zip([5, 10], history.get_metric_values(name), strict=True))
    assert run.others == {"Name": "first", "offline_experiment": True, "status": "finished"}
    assert (run.about["project_name"], run.about["workspace"], run.about["tags"]) == ("digits", "team", ["a"])
    assert (run.parameters["optimizer.lr"], run.parameters["token"], run.parameters["none"]) == (0.1, "***", None)
    assert logger.path is not None
    assert list(folder.iterdir()) == [logger.path]


def test_the_archive_has_no_secrets_code_or_host_details(folder: Path, make: Callable[..., Any]) -> None:
    make(Tracker(CometLogger(folder=folder))).fit(max_length=Epochs(1))
    (run,) = read(folder)
    # The reader accepts no messages of other types: packages, host, output, source code and git have their own.
    assert sorted(run.files) == ["experiment.json", "messages.json"]
    assert not any(b"hunter2" in content for content in run.files.values())


def test_histograms_and_figures_are_the_types_of_comet(folder: Path, figure: Any) -> None:
    logger = CometLogger(folder=folder)
    logger.start(Run("a"))
    histogram = Histogram([-1.0, 1.0, 1.0, 3.0], bins=2)
    logger.log({"weights/w": histogram, "confusion": figure, "nan": float("nan")}, 7)
    logger.finish("failed")
    (run,) = read(folder)
    step, content = run.uploads["weights/w"]
    restored = pytest.importorskip("comet_ml").Histogram.from_json(json.loads(content), verbose=False)
    # The centres of the two bins are 0 and 2.
    counts = {restored.get_bin_index(0.0): 1, restored.get_bin_index(2.0): 3}
    assert (step, {place: int(count) for place, count in enumerate(restored.counts) if count}) == (7, counts)
    step, content = run.uploads["confusion"]
    assert (step, content[:4]) == (7, b"\x89PNG")
    assert run.series("nan") == [(7, "NaN")]
    assert run.others["status"] == "failed"


def test_a_resumed_run_continues_and_nothing_appears_twice(folder: Path, make: Callable[..., Any]) -> None:
    states: list[Any] = []
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    # The first process trains for two epochs, and the second one resumes after the first epoch. A third one was killed.
    random.seed(0)
    first = make(Tracker(CometLogger(folder=folder), histograms_every=10), keep).fit(max_length=Epochs(2))
    key = read(folder)[0].about["offline_id"]
    (folder / f"{key}-killed.zip").write_bytes(b"PK")
    random.seed(0)
    trainer = make(Tracker(CometLogger(folder=folder), histograms_every=10))
    trainer.load_state_dict(states[0])
    history = trainer.fit(max_length=Epochs(3))
    (folder / f"{key}-killed.zip").unlink()
    runs = read(folder)
    assert [run.about["offline_id"] for run in runs] == [key, key]
    assert [run.about["resume_strategy"] for run in runs] == ["get_or_create"] * 2
    expected = list(zip([5, 10, 15], history.get_metric_values("train_loss"), strict=True))
    assert [run.series("train_loss") for run in runs] == [expected[:2], expected[2:]]
    assert expected[:2] == list(zip([5, 10], first.get_metric_values("train_loss"), strict=True))
    assert [bool(run.uploads) for run in runs] == [True, False]
    every = [(name, step) for run in runs for name, step, _ in run.rows]
    assert len(every) == len(set(every))


def test_two_trackers_and_an_experiment_of_the_user_have_one_run_each(folder: Path) -> None:
    config = pytest.importorskip("comet_ml.config")
    first, second = CometLogger(folder=folder), CometLogger(folder=folder)
    users = object()
    config.set_global_experiment(users)
    try:
        first.start(Run("a"))
        second.start(Run("b"))
        assert config.get_global_experiment() is users
    finally:
        config.set_global_experiment(None)
    first.log({"x": 1.0}, 1)
    second.log({"x": 2.0}, 1)
    first.finish("finished")
    second.finish("finished")
    assert [Read(logger.path).series("x") for logger in (first, second) if logger.path] == [[(1, 1.0)], [(1, 2.0)]]


def test_the_comet_logger_prints_nothing_and_draws_no_random_numbers(
    folder: Path, make: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    make().fit(max_length=Epochs(1))
    alone = random.getstate(), torch.get_rng_state().tolist(), sys.excepthook
    make(Tracker(CometLogger(folder=folder))).fit(max_length=Epochs(1))
    assert capfd.readouterr() == ("", "")
    assert (random.getstate(), torch.get_rng_state().tolist(), sys.excepthook) == alone


FRESH = """
import random
import sys

sys.modules["rfc3987_syntax"] = None


def refuse(event, arguments):
    assert event not in ("socket.connect", "socket.getaddrinfo"), arguments


from dovetail.tracking import CometLogger, Run

sys.addaudithook(refuse)
# With this seed, Comet would choose this process for its reports of errors.
random.seed(0)
before = random.getstate(), sys.excepthook
logger = CometLogger(folder="runs")
logger.start(Run("a"))
logger.log({"x": 1.0}, 1)
logger.finish("finished")
assert (random.getstate(), sys.excepthook) == before

import comet_ml
import sentry_sdk

assert not sentry_sdk.get_client().is_active()
assert not hasattr(comet_ml, "MODULE_FINDER")
"""


@pytest.mark.full_size
@pytest.mark.slow
@pytest.mark.usefixtures("comet", "forking")
def test_the_import_of_comet_sends_prints_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMET_ERROR_TRACKING_ENABLE", "COMET_DISABLE_AUTO_LOGGING", "COMET_LOGGING_CONSOLE"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "script.py"
    script.write_text(FRESH)
    done = run(script, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (archive,) = read(tmp_path / "runs")
    # Outside of tests, Comet adds the duration of the process when a run ends.
    assert archive.rows == [("x", 1, 1.0)]


def test_online_mode_without_a_key_is_an_error(comet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMET_API_KEY")
    with pytest.raises(ConfigError, match="mode 'online' needs a key: set COMET_API_KEY"):
        CometLogger(mode="online").start(Run("a"))


def test_a_rejected_key_is_masked_and_does_not_stop_training(
    comet: None, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    received: list[Any] = []

    class Rejects(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            content = json.dumps({"sdk_error_code": 90212, "msg": "no such key"}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Rejects) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("COMET_URL_OVERRIDE", f"http://127.0.0.1:{server.server_port}/clientlib/")
        trainer = make(Tracker(CometLogger(mode="online")))
        with pytest.warns(UserWarning, match="CometLogger is disabled for the rest of this run") as reported:
            trainer.fit(max_length=Epochs(1))
        server.shutdown()
        thread.join()
    assert [request["apiKey"] for request in received] == [KEY]
    (message,) = (str(each.message) for each in reported)
    assert "***" in message
    assert KEY not in message
    assert capfd.readouterr() == ("", "")
    assert trainer.context.progress.epoch == 1


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(MissingExtraError, match=r"comet_ml is not installed: pip install 'dovetail\[comet\]'"):
        CometLogger().start(Run("a"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "async"}, "mode: expected 'offline' or 'online', got 'async'"),
        ({"api_key": "hunter2"}, "api_key is not an option: set COMET_API_KEY"),
        ({"experiment_key": "a"}, "experiment_key is not an option: it is set by the run"),
        ({"offline_directory": "runs"}, "give the folder of the archives as folder="),
    ],
)
def test_options_that_the_comet_logger_sets_itself_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CometLogger(**options)
