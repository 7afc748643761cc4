from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.callbacks import LambdaCallback
from dovetail.tracking import Histogram, Run, TensorBoardLogger, Tracker
from dovetail.units import Epochs

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
hparams = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")


def read(path: Path) -> Any:
    events = accumulators.EventAccumulator(str(path), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
    events.Reload()
    return events


def scalars(events: Any, name: str) -> list[tuple[int, Any]]:
    return [(event.step, event.value) for event in events.Scalars(name)]


def hparams_of(events: Any) -> tuple[Any, Any]:
    content = {}
    for tag in ("_hparams_/session_start_info", "_hparams_/session_end_info"):
        data = hparams.HParamsPluginData.FromString(events.SummaryMetadata(tag).plugin_data.content)
        content[tag] = data
    start, end = content.values()
    return start.session_start_info.hparams, end.session_end_info.status


def test_the_logged_metrics_equal_the_history(make: Callable[..., Any], tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    history = make(Tracker(logger)).fit(max_length=Epochs(2))
    events = read(logger.path)
    for name in ("train_loss", "valid_loss"):
        steps, values = zip(*scalars(events, name), strict=True)
        assert steps == (5, 10)
        assert values == pytest.approx(history.get_metric_values(name), rel=1e-6)
    assert scalars(events, "lr/group0")[0] == (2, pytest.approx(0.1))


def test_the_hyperparameters_are_shown(make: Callable[..., Any], tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    make(Tracker(logger, hyperparameters={"token": "hunter2", "none": None})).fit(max_length=Epochs(1))
    found, status = hparams_of(read(logger.path))
    assert found["optimizer.lr"].number_value == 0.1
    assert found["token"].string_value == "***"
    assert found["none"].string_value == "None"
    assert status == 1


def test_an_interrupted_run_has_the_status_failed(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.start(Run("a"))
    logger.finish("failed")
    assert hparams_of(read(logger.path))[1] == 2


def test_histograms_keep_their_bins(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.start(Run("a"))
    logger.log({"weights/w": Histogram([0.0, 1.0, 1.0, 4.0], bins=2), "empty": Histogram([])}, 7)
    logger.finish("finished")
    (event,) = read(logger.path).Histograms("weights/w")
    value = event.histogram_value
    assert (event.step, value.num, value.sum, value.sum_squares) == (7, 4, 6, 18)
    assert (value.bucket_limit, value.bucket) == ([2.0, 4.0], [3, 1])


def test_a_figure_is_logged_as_an_image(tmp_path: Path, figure: Any) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.start(Run("a"))
    logger.log({"confusion": figure}, 7)
    logger.finish("finished")
    (image,) = read(logger.path).Images("confusion")
    assert image.step == 7
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_a_resumed_run_continues_without_duplicates(make: Callable[..., Any], tmp_path: Path) -> None:
    states, logger = [], TensorBoardLogger(tmp_path)
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    history = make(Tracker(logger), keep).fit(max_length=Epochs(3))
    resumed = TensorBoardLogger(tmp_path)
    trainer = make(Tracker(resumed))
    trainer.load_state_dict(states[0])
    trainer.fit(max_length=Epochs(3))
    assert resumed.path == logger.path
    steps, values = zip(*scalars(read(logger.path), "train_loss"), strict=True)
    assert steps == (5, 10, 15)
    assert values == pytest.approx(history.get_metric_values("train_loss"), rel=1e-6)


def test_a_missing_tensorboard_package_is_named(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.warns(UserWarning, match=r"tensorboard is not installed: pip install 'dovetail\[tensorboard\]'"):
        make(Tracker(TensorBoardLogger(tmp_path))).fit(max_length=Epochs(1))
