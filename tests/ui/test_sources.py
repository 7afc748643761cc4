"""Experiments and federations of the page, and their charts."""

from __future__ import annotations

import json
import sqlite3
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.federated.servers.results import WriteResults
from dovetail.history import History
from dovetail.search.charts import BarChart, LineChart, quality_color
from dovetail.search.processes import Attempt
from dovetail.search.records import ExperimentError, ExperimentRecord, TrialRecord
from dovetail.search.report import experiment_charts
from dovetail.search.schema import read_experiment
from dovetail.search.store import Store
from dovetail.servers import fedavg
from dovetail.ui import charts
from dovetail.ui.experiments import ExperimentSource, rungs, timeline, trial_rows
from dovetail.ui.federations import Federation
from dovetail.ui.library import Library

pytest.importorskip("optuna")

START = datetime(2026, 1, 2, tzinfo=timezone.utc)
CONFIG = {
    "name": "search",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "random", "metric": "loss", "max_trials": 4},
    "hyperparameters": {"lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1}, "act": "relu"},
}


def record(folder: Path, number: int = 6) -> ExperimentRecord:
    trials = tuple(
        TrialRecord(
            id=10 + index,
            number=index,
            experiment_id=1,
            state="STOPPED" if index % 2 else "COMPLETED",
            hparams={"lr": 0.1 / (index + 1), "act": "relu" if index < 3 else "<b>tanh</b>", ":x": index},
            directory=folder,
            best=1.0 / (index + 1),
            latest=1.0,
            steps=20 if index % 2 else 40,
            values={20: 1.0 + 1.0 / (index + 1), **({} if index % 2 else {40: 1.0 / (index + 1)})},
            reason="stopped by the searcher for its value after 20 batches" if index % 2 else None,
            started=START + timedelta(seconds=index),
            ended=START + timedelta(seconds=index + 2),
        )
        for index in range(number)
    )
    return ExperimentRecord(1, "search", "COMPLETED", CONFIG, folder, START, START, trials=trials)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "project" / ".dovetail")


def create(store: Store, tmp_path: Path) -> ExperimentRecord:
    code = tmp_path / "code"
    code.mkdir(exist_ok=True)
    return store.create_experiment(read_experiment(CONFIG), json.dumps(CONFIG), code)


def test_a_store_below_a_folder_is_found_with_its_trials_as_runs(store: Store, tmp_path: Path) -> None:
    made = create(store, tmp_path)
    trial = store.add_trial(made.id, {}, {}, {"lr": 0.1, "net": {"depth": 2}})
    folder = store.trials_directory(made.id) / f"trial_{trial}"
    folder.mkdir(parents=True)
    row = {"group": "validation", "steps_completed": 10, "metrics": {"loss": 0.5}, "time": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    library = Library([tmp_path / "project"])
    library.scan()
    library.poll_stores()
    library.poll()
    found = library.experiment(0, made.id)
    assert found is not None
    assert found[1] == made.__class__(**vars(store.experiment(made.id)))
    (run,) = library.runs.values()
    assert (run.name, run.group, run.summary().state) == (f"trial {trial}", f"search · experiment {made.id}", "killed")
    assert (run.summary().last, dict(run.settings)) == (0.5, {"lr": 0.1, "net.depth": 2})
    assert library.experiment(0, 99) is library.experiment(7, 1) is None
    # The history of a trainer in the trial.
    (folder / "run").mkdir()
    History().save(folder / "run" / "ck_history.jsonl")
    library.scan()
    library.poll_stores()
    assert [each.group for each in library.runs.values()] == [run.group] * 2


def test_new_trials_and_states_are_read_and_finished_ones_are_not(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(store, tmp_path)
    source = ExperimentSource(lambda: store, "store")
    assert source.poll() is True
    assert source.poll() is False
    trial = store.add_trial(made.id, {}, {}, {"lr": 0.1})
    store.add_value(trial, 10, 0.5)
    assert source.poll() is True
    assert source.records[made.id].trials[0].best == 0.5
    store.set_state(made.id, "COMPLETED")
    source.poll()
    monkeypatch.setattr(Store, "experiment", lambda *_: pytest.fail("read again"))
    assert source.poll() is False


def test_a_store_that_fails_keeps_the_last_records(store: Store, tmp_path: Path) -> None:
    made = create(store, tmp_path)
    source = ExperimentSource(lambda: store, "store")
    source.poll()
    # Another program holds an exclusive lock, and has removed a table.
    connection = sqlite3.connect(store.home / "store.db")
    connection.execute("ALTER TABLE studies RENAME TO hidden")
    connection.commit()
    assert source.poll() is True
    assert (source.problem, list(source.records)) == ("the store cannot be read now: StorageInternalError", [made.id])
    connection.execute("ALTER TABLE hidden RENAME TO studies")
    connection.commit()
    connection.close()
    assert (source.poll(), source.problem) == (True, None)


def test_a_locked_store_can_be_read(store: Store, tmp_path: Path) -> None:
    made = create(store, tmp_path)
    connection = sqlite3.connect(store.home / "store.db", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    source = ExperimentSource(lambda: store, "store")
    assert (source.poll(), source.problem, list(source.records)) == (True, None, [made.id])
    connection.execute("ROLLBACK")
    connection.close()


def test_commands_are_rejected_in_the_wrong_state(store: Store, tmp_path: Path) -> None:
    made = create(store, tmp_path)
    source = ExperimentSource(lambda: store, "store")
    trial = store.add_trial(made.id, {}, {}, {})
    with pytest.raises(ExperimentError, match=f"trial {trial} does not run"):
        source.kill_trial(made.id, trial)
    source.command(made.id, "cancel")
    assert store.experiment(made.id).state == "CANCELED"
    with pytest.raises(ExperimentError, match="is CANCELED already"):
        source.command(made.id, "resume")


def test_a_trial_is_killed_by_a_request_that_its_runner_finds(store: Store, tmp_path: Path) -> None:
    made = create(store, tmp_path)
    trial = store.add_trial(made.id, {}, {}, {})
    attempt = Attempt.of(store.trials_directory(made.id) / f"trial_{trial}", 0)
    attempt.folder.mkdir(parents=True)
    source = ExperimentSource(lambda: store, "store")
    with store.running(made.id):
        source.kill_trial(made.id, trial)
    assert attempt.exit_request == "cancel"


def test_rungs_and_workers_follow_from_the_trials(tmp_path: Path) -> None:
    it = record(tmp_path)
    assert rungs(it) == [{"batches": 20, "reached": 6, "stopped": 3}, {"batches": 40, "reached": 3, "stopped": 0}]
    assert [span[:3] for span in timeline(it)][:2] == [(10, 0.0, 2.0), (11, 1.0, 3.0)]
    gantt = charts.gantt(it)
    assert gantt is not None
    assert gantt["yAxis"]["data"] == ["worker 1", "worker 2"]


def test_the_page_draws_the_charts_of_the_report(tmp_path: Path) -> None:
    it = record(tmp_path)
    found = {name: chart for name, (_, chart) in experiment_charts(it).items()}
    made = {name: charts.drawn(chart) for name, chart in found.items() if not isinstance(chart, str)}
    curves, best, importance = found["curves"], found["best"], found["importance"]
    assert isinstance(curves, LineChart)
    assert isinstance(best, LineChart)
    assert isinstance(importance, BarChart)
    shown = {str(series["data"]): series["color"] for series in made["curves"]["series"]}
    assert shown == {str([list(point) for point in line.points]): quality_color(line.quality) for line in curves.lines}
    stairs, dots = made["best"]["series"]
    assert stairs["data"] == [list(point) for point in best.lines[0].points]
    assert sorted(each["value"] for each in dots["data"]) == [list(line.points[0]) for line in best.lines[1:]]
    parallel = made["parallel"]
    assert [axis["type"] for axis in parallel["parallelAxis"]] == ["log", "category", "value", "value"]
    # ECharts draws numbers of words at the right places, and all words of such an axis at one place.
    assert parallel["parallelAxis"][1]["data"] == ["<b>tanh</b>", "relu"]
    assert [line["value"][1] for line in parallel["series"][0]["data"]] == [1, 1, 1, 0, 0, 0]
    assert made["importance"]["series"][0]["data"] == [share for _, share in reversed(importance.bars)]
    assert "6 trials after 20 batches" in importance.note
    assert len(charts.slices(it)) == 3
    one = experiment_charts(record(tmp_path, 1), with_importance=False)
    assert isinstance(one["parallel"][1], str)
    assert "importance" not in one


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(key for each in value.values() for key in keys(each))}
    return {key for each in value for key in keys(each)} if isinstance(value, list) else set()


def test_text_of_users_is_never_a_key_that_could_run(tmp_path: Path) -> None:
    it = record(tmp_path)
    name = ":alert(1)"
    curve = (name, np.arange(3.0), np.arange(3.0), False)
    made = [charts.drawn(chart) for _, chart in experiment_charts(it).values() if not isinstance(chart, str)]
    made += [charts.gantt(it) or {}, *(options for _, options in charts.slices(it))]
    made += [charts.comparison([curve], [(name, *(np.arange(3.0),) * 4)], name, name, log_x=True, log_y=True)]
    assert not [key for each in made for key in keys(json.loads(json.dumps(each))) if key.startswith(":")]
    assert not [key for row in trial_rows(it) for key in row if key.startswith(":")]


def test_charts_are_strict_json_without_values_that_a_log_axis_lacks() -> None:
    x = np.array([0.0, 1.0, 2.0, 3.0])
    y = np.array([1.0, np.nan, np.inf, 0.0])
    plain = charts.comparison([("a", x, y, True)], [], "batch", "loss")
    assert plain["series"][0]["data"] == [[0, 1], [1, None], [2, None], [3, 0]]
    logarithmic = charts.comparison([("a", x, y, False)], [], "batch", "loss", log_x=True, log_y=True)
    assert logarithmic["series"][0]["data"] == [[2, None]]
    json.dumps([plain, logarithmic], allow_nan=False)


# Federations


def test_a_federation_is_read_from_its_checkpoint_and_from_its_table(tmp_path: Path) -> None:
    folder, table = tmp_path / "fed", tmp_path / "table"
    options: dict[str, Any] = {"rounds": 2, "total_clients": 3, "per_round": 2, "callbacks": [WriteResults(table)]}
    server = fedavg.Server(checkpoint_path=str(folder), **options)
    server.run()
    # An earlier version wrote no journal.
    for place in (folder, table):
        (place / "federation_run.jsonl").unlink()
    library = Library([tmp_path])
    library.scan()
    library.poll()
    found = {each.name: each for each in library.federations.values()}
    assert sorted(found) == ["fed", "table"]
    for each in found.values():
        for mine, theirs in zip(each.rounds, server.records, strict=True):
            assert (mine.number, mine.selected, mine.reported) == (theirs.round, theirs.selected, theirs.reported)
            assert (mine.bytes_up, mine.metrics) == (theirs.bytes_up, dict(theirs.metrics))
    assert (found["fed"].algorithm, sum(found["fed"].selections().values())) == ("FedAvg", 4)
    assert found["fed"].poll() is False
    for make in (charts.traffic, charts.selection_map):
        json.dumps(make(found["fed"]), allow_nan=False)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"records": 3}', '{"records": [{}], "algorithm": {"name": "a"}}', "[" * 99999]
)
def test_a_damaged_state_is_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "round_1").mkdir()
    (tmp_path / "round_1" / "state.json").write_text(content)
    federation = Federation("0:.", "a", tmp_path)
    assert (federation.poll(), federation.rounds) == (False, ())


def test_faults_and_spread_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "rounds.csv").write_text(
        "round,selected,reported,faults,clients_accuracy,clients_accuracy_std,clients_accuracy_worst\n"
        "1,1 2,1,2 timeout,0.5,0.1,0.4\n2,1 2,1 2,,0.6,0.1,0.5\n"
    )
    federation = Federation("0:.", "a", tmp_path)
    federation.poll()
    assert {client: dict(kinds) for client, kinds in federation.faults_by_client().items()} == {2: {"timeout": 1}}
    spread = charts.spread(federation)
    assert spread is not None
    assert spread["series"][-1]["data"] == [[1, 0.4], [2, 0.5]]
    assert charts.selection_map(federation)["series"][0]["data"] == [[0, 0, 0], [0, 1, 2], [1, 0, 0], [1, 1, 0]]
