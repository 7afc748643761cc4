from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dovetail.callbacks import LambdaCallback
from dovetail.errors import ConfigError
from dovetail.tracking import Histogram, Run, Tracker, WandBLogger
from dovetail.units import Epochs

if find_spec("wandb") is None:
    pytest.skip("wandb is not installed", allow_module_level=True)


@pytest.fixture
def make_logger(tmp_path: Path) -> Callable[..., WandBLogger]:
    return lambda **options: WandBLogger("digits", "offline", dir=str(tmp_path / "new"), **options)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[], list[Read]]:
    """Reads every offline run back, the oldest first."""

    def read() -> list[Read]:
        import wandb

        # Its process may still be writing when a run is finished; it has written all when it has ended.
        wandb.teardown()
        return [Read(path) for path in sorted(tmp_path.glob("new/wandb/offline-run-*/run-*.wandb"))]

    return read


class Read:
    """The records of a `.wandb` file: a LevelDB log, each of whose entries is a message of protocol buffers."""

    def __init__(self, path: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

        self.folder = path.parent
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.run = self.exit = None
        for entry in entries(path.read_bytes()):
            record = Record.FromString(entry)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self.config.update(items(record.run.config.update))
            elif kind == "config":
                self.config.update(items(record.config.update))
            elif kind == "history":
                self.rows.append(items(record.history.item))
            elif kind == "exit":
                self.exit = record.exit.exit_code

    def series(self, name: str) -> list[tuple[int, Any]]:
        return [(row["_step"], row[name]) for row in self.rows if name in row]


def items(found: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for item in found:
        *outer, name = item.nested_key or [item.key]
        place = made
        for key in outer:
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return made


def entries(content: Any) -> Iterator[bytes]:
    block, header, whole, last = 32768, 7, 1, 4
    assert content[:4] == b":W&B"
    place, parts = header, []
    while place + header <= len(content):
        if block - place % block < header:
            place += block - place % block
        _, length, kind = struct.unpack("<IHB", content[place : place + header])
        parts.append(content[place + header : place + header + length])
        place += header + length
        if kind in (whole, last):
            yield b"".join(parts)
            parts = []


def test_the_logged_metrics_equal_the_history(
    make: Callable[..., Any], make_logger: Callable[..., Any], read: Callable[..., Any]
) -> None:
    history = make(Tracker(make_logger())).fit(max_length=Epochs(2))
    (run,) = read()
    for name in ("train_loss", "valid_loss"):
        assert run.series(name) == list(zip([5, 10], history.get_metric_values(name), strict=True))
    assert run.exit == 0


def test_the_hyperparameters_are_the_wandb_configuration(
    make: Callable[..., Any], make_logger: Callable[..., Any], read: Callable[..., Any]
) -> None:
    make(Tracker(make_logger(name="first"), hyperparameters={"token": "hunter2"})).fit(max_length=Epochs(1))
    (run,) = read()
    assert (run.config["optimizer.lr"], run.config["token"]) == (0.1, "***")
    assert (run.run.project, run.run.display_name) == ("digits", "first")


def test_an_interrupted_run_has_the_status_failed(make_logger: Callable[..., Any], read: Callable[..., Any]) -> None:
    logger = make_logger()
    logger.start(Run("a"))
    logger.finish("failed")
    assert read()[0].exit == 1


def test_histograms_and_figures_are_shown(
    make_logger: Callable[..., Any], read: Callable[..., Any], figure: Any
) -> None:
    logger = make_logger()
    logger.start(Run("a"))
    logger.log({"weights/w": Histogram([0.0, 1.0, 1.0, 4.0], bins=2), "confusion": figure}, 7)
    logger.finish("finished")
    (run,) = read()
    ((step, histogram),) = run.series("weights/w")
    assert step == 7
    assert (histogram["values"], histogram["bins"]) == ([3, 1], [0, 2, 4])
    ((_, image),) = run.series("confusion")
    assert (run.folder / "files" / image["path"]).read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_has_the_same_id(
    make: Callable[..., Any], make_logger: Callable[..., Any], read: Callable[..., Any]
) -> None:
    states = []
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    make(Tracker(make_logger()), keep).fit(max_length=Epochs(1))
    trainer = make(Tracker(make_logger()))
    trainer.load_state_dict(states[0])
    trainer.fit(max_length=Epochs(2))
    runs = read()
    assert {run.run.run_id for run in runs} == {trainer.context.run.id}
    assert [step for run in runs for step, _ in run.series("train_loss")] == [5, 10]


def test_two_trackers_have_one_run_each(make_logger: Callable[..., Any], read: Callable[..., Any]) -> None:
    first, second = make_logger(), make_logger()
    first.start(Run("a"))
    second.start(Run("b"))
    first.log({"x": 1.0}, 1)
    second.log({"x": 2.0}, 1)
    first.finish("finished")
    second.finish("finished")
    assert {run.run.run_id: run.series("x") for run in read()} == {"a": [(1, 1.0)], "b": [(1, 2.0)]}


def test_an_unreachable_service_does_not_stop_training(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    settings = {"base_url": "http://127.0.0.1:9", "init_timeout": 1}
    trainer = make(Tracker(WandBLogger("digits", "online", dir=str(tmp_path), settings=settings)))
    with pytest.warns(UserWarning, match="WandBLogger is disabled for the rest of this run") as reported:
        trainer.fit(max_length=Epochs(1))
    assert len(reported) == 1
    assert trainer.context.progress.epoch == 1


def test_the_wandb_logger_prints_nothing(
    make: Callable[..., Any], make_logger: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    make(Tracker(make_logger())).fit(max_length=Epochs(1))
    assert capfd.readouterr() == ("", "")


def test_values_derived_from_the_run_are_not_options() -> None:
    with pytest.raises(ConfigError, match="WandBLogger: id is set by the run"):
        WandBLogger("digits", id="a")
