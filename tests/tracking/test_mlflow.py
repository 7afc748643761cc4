from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.callbacks import LambdaCallback
from dovetail.tracking import Histogram, MLflowLogger, Run, Tracker
from dovetail.units import Epochs

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose tables are made: that takes longer than all the rest."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    logger = MLflowLogger("other", f"sqlite:///{folder}/store.db", artifact_location=str(folder))
    logger.start(Run("a"))
    logger.finish("finished")
    return folder / "store.db"


@pytest.fixture
def store(template: Any, tmp_path: Path) -> str:
    path = tmp_path / "store.db"
    path.write_bytes(template.read_bytes())
    return f"sqlite:///{path}"


@pytest.fixture
def make_logger(store: Any, tmp_path: Path) -> Callable[..., MLflowLogger]:
    return lambda **options: MLflowLogger("digits", store, artifact_location=str(tmp_path / "artifacts"), **options)


@pytest.fixture
def runs(store: Any) -> Any:
    """Reads all runs of the experiment back from the store."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=store)

    def runs() -> Any:
        experiment = client.get_experiment_by_name("digits")
        assert experiment is not None
        found = client.search_runs([experiment.experiment_id])
        return [(run, lambda name, run=run: client.get_metric_history(run.info.run_id, name)) for run in found]

    return runs


def points(metrics: Any) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in metrics]


def test_the_logged_metrics_equal_the_history(
    make: Callable[..., Any], make_logger: Callable[..., Any], runs: Any
) -> None:
    history = make(Tracker(make_logger())).fit(max_length=Epochs(2))
    ((run, metric),) = runs()
    for name in ("train_loss", "valid_loss"):
        assert points(metric(name)) == list(zip([5, 10], history.get_metric_values(name), strict=True))
    assert run.info.status == "FINISHED"


def test_the_hyperparameters_are_mlflow_parameters(
    make: Callable[..., Any], make_logger: Callable[..., Any], runs: Any
) -> None:
    many = {f"x{number}": number for number in range(120)}
    make(Tracker(make_logger(tags={"team": "a"}), hyperparameters={"token": "hunter2", **many})).fit(
        max_length=Epochs(1)
    )
    ((run, _),) = runs()
    assert run.data.params["optimizer.lr"] == "0.1"
    assert run.data.params["token"] == "***"
    assert run.data.params["x119"] == "119"
    assert run.data.tags["team"] == "a"


def test_an_interrupted_run_has_the_status_failed(make_logger: Callable[..., Any], runs: Any) -> None:
    logger = make_logger()
    logger.start(Run("a"))
    logger.finish("failed")
    assert runs()[0][0].info.status == "FAILED"


def test_names_and_numbers_that_mlflow_rejects_are_converted(make_logger: Callable[..., Any], runs: Any) -> None:
    logger = make_logger()
    logger.start(Run("a"))
    logger.log({"acc@5": 0.5, "nan": math.nan}, 1)
    logger.finish("finished")
    ((_, metric),) = runs()
    assert points(metric("acc_5")) == [(1, 0.5)]
    assert math.isnan(metric("nan")[0].value)


def test_histograms_and_figures_are_artifacts(make_logger: Callable[..., Any], tmp_path: Path, figure: Any) -> None:
    logger = make_logger()
    logger.start(Run("a"))
    logger.log({"weights/w": Histogram([0.0, 1.0, 1.0, 4.0], bins=2), "valid/confusion": figure}, 7)
    folder = tmp_path / "artifacts" / logger.run_id / "artifacts"
    logger.finish("finished")
    content = json.loads((folder / "histograms/7.json").read_text())
    assert content == {"weights/w": {"counts": [3, 1], "edges": [0.0, 2.0, 4.0]}}
    assert (folder / "figures/valid/confusion/7.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_continues_without_duplicates(
    make: Callable[..., Any], make_logger: Callable[..., Any], runs: Any
) -> None:
    states = []
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    history = make(Tracker(make_logger()), keep).fit(max_length=Epochs(2))
    trainer = make(Tracker(make_logger(), hyperparameters={"new": 1}))
    trainer.load_state_dict(states[0])
    trainer.fit(max_length=Epochs(3))
    ((run, metric),) = runs()
    assert [step for step, _ in points(metric("train_loss"))] == [5, 10, 15]
    assert points(metric("train_loss"))[:2] == list(zip([5, 10], history.get_metric_values("train_loss"), strict=True))
    assert run.data.params["new"] == "1"
    assert run.info.status == "FINISHED"


def test_an_unreachable_store_does_not_stop_training(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    trainer = make(Tracker(MLflowLogger("digits", "http://127.0.0.1:9")))
    with pytest.warns(UserWarning, match="MLflowLogger is disabled for the rest of this run") as reported:
        trainer.fit(max_length=Epochs(1))
    assert len(reported) == 1
    assert trainer.context.progress.epoch == 1


@pytest.mark.slow
def test_the_mlflow_logger_prints_nothing(
    make: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    logger = MLflowLogger("digits", f"sqlite:///{tmp_path}/new.db", artifact_location=str(tmp_path / "artifacts"))
    make(Tracker(logger)).fit(max_length=Epochs(1))
    assert capfd.readouterr() == ("", "")
