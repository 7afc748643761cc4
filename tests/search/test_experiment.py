"""Experiments from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from dovetail.errors import ConfigError, InvalidHP
from dovetail.search.experiment import Experiment, TrialStopped, search
from dovetail.search.store import Store

Report = Callable[[int, float], None]
SPACE = {"x": {"type": "double", "minval": -2, "maxval": 2, "count": 5}, "offset": 1}
FILE = """
entrypoint: sh trial.sh
hyperparameters: {lr: {type: categorical, vals: [1, 2, 3]}}
searcher: {name: grid, metric: loss}
"""


SCRIPT = """
grep -q '"lr"' "$DOVETAIL_TRIAL" && echo hello
echo '{"group": "validation", "steps_completed": 1, "metrics": {"loss": 0.5}}' >"${DOVETAIL_TRIAL%/*}/metrics.jsonl"
"""


def _parabola(hparams: dict[str, Any], report: Report) -> float:
    return float((hparams["x"] - hparams["offset"]) ** 2)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "trial.sh").write_text(SCRIPT)
    (tmp_path / "grid.yaml").write_text(FILE)
    return tmp_path / "code"


def test_an_experiment_file_runs_to_its_end(code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(tmp_path / "home")
    done = Experiment.from_yaml(tmp_path / "grid.yaml", code).run(store, follow=True)
    assert (done.name, done.state, len(done.trials)) == ("grid", "COMPLETED", 3)
    assert (done.directory / "config.yaml").read_text() == FILE
    assert (done.trials[0].directory / "log.txt").read_text() == "hello\n"
    assert "trial 3 COMPLETED {'lr': 3}, best loss 0.5 after 1" in capsys.readouterr().out.splitlines()
    assert store.experiment(done.id) == done


def test_settings_override_the_file(code: Path, tmp_path: Path) -> None:
    experiment = Experiment.from_yaml(
        tmp_path / "grid.yaml", code, ["hyperparameters.lr={type: categorical, vals: [7]}"]
    )
    record = experiment.create(Store.open(tmp_path / "home"))
    assert record.config["hyperparameters"] == {"lr": {"type": "categorical", "vals": [7]}}
    assert record.state == "ACTIVE"


def test_without_a_store_the_experiment_is_stored_in_the_working_directory(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = Experiment.from_yaml("grid.yaml", "code").run()
    assert done.directory == tmp_path / ".dovetail" / "experiments" / "1"


def test_mistakes_of_a_file_are_reported_before_anything_is_written(code: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(FILE.replace("metric", "metrik"))
    with pytest.raises(ConfigError, match="metrik"):
        Experiment.from_yaml(tmp_path / "grid.yaml", code)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", "grid.yaml"]


# ------------------------------------------------------------------ functions


def test_a_grid_search_over_a_function_finds_the_best_point() -> None:
    found = search(_parabola, SPACE, "grid")
    assert [trial.hparams["x"] for trial in found.trials] == [-2, -1, 0, 1, 2]
    assert [trial.best for trial in found.trials] == [9, 4, 1, 0, 1]
    assert (found.best_hparams, found.best_value) == ({"x": 1.0, "offset": 1}, 0.0)
    assert found.study.best_params == {"x": 1.0}


def test_equal_seeds_give_equal_trials_and_other_seeds_others() -> None:
    first, again, other = (
        [trial.hparams for trial in search(_parabola, SPACE, max_trials=4, seed=seed).trials] for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_a_search_can_maximize_the_metric() -> None:
    found = search(_parabola, SPACE, "grid", smaller_is_better=False)
    assert (found.best_hparams, found.best_value) == ({"x": -2.0, "offset": 1}, 9.0)


def test_a_function_that_reports_may_be_stopped_early() -> None:
    reached: list[int] = []

    def trained(hparams: dict[str, Any], report: Report) -> None:
        for epoch in range(1, 10):
            reached.append(epoch)
            report(epoch, len(found_at) + 1)
        raise AssertionError("the searcher ends every trial at max_time")

    found_at: list[int] = []
    options: dict[str, Any] = {"num_rungs": 2, "max_time": 4, "divisor": 2, "time_metric": "epochs"}

    def counted(hparams: dict[str, Any], report: Report) -> None:
        try:
            trained(hparams, report)
        except TrialStopped:
            found_at.append(reached[-1])
            raise

    found = search(counted, {"x": SPACE["x"]}, "async_halving", max_trials=2, **options)
    # The first trial reaches the top; the second is worse, and ends at the first rung.
    assert found_at == [4, 2]
    assert [max(trial.values) for trial in found.trials] == [4, 2]
    assert [trial.state for trial in found.study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]


def test_the_return_value_of_a_function_follows_its_reports() -> None:
    def reporting(hparams: dict[str, Any], report: Report) -> float:
        report(1, 0.5)
        report(2, 0.4)
        return 0.3

    assert search(reporting, {}, "single").trials[0].values == {1: 0.5, 2: 0.4, 3: 0.3}


def test_trials_with_invalid_hyperparameters_are_replaced() -> None:
    def picky(hparams: dict[str, Any], report: Report) -> float:
        if hparams["x"] < 0:
            raise InvalidHP("negative")
        return float(hparams["x"])

    found = search(picky, SPACE, max_trials=6)
    states = [trial.state for trial in found.trials]
    assert "INVALID_HP" in states
    assert states.count("COMPLETED") == 6


def test_an_error_of_the_function_ends_the_search_and_names_hyperparameters() -> None:
    def broken(hparams: dict[str, Any], report: Report) -> float:
        raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError) as raised:
        search(broken, {"lr": 0.1}, "single")
    assert raised.value.__notes__ == ["with the hyperparameters {'lr': 0.1}"]


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_trials"):
        search(_parabola, SPACE, max_trails=3)
