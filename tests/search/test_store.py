"""The store: what is written is read, by Optuna's own tools too, on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from postgres import start_postgres

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.search.processes import Attempt
from dovetail.search.records import ExperimentError
from dovetail.search.runner import Runner, start_detached
from dovetail.search.store import Store, home_directory

RANGES = {
    "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1, "count": 3},
    "net": {"act": {"type": "categorical", "vals": ["relu"]}, "width": 64},
}
SCRIPT = "report(1, hparams['lr']); report(2, hparams['lr'] / 2)"


# ------------------------------------------------------------------ where


def test_the_store_folder_is_given_or_from_the_environment_or_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DOVETAIL_HOME", raising=False)
    assert home_directory() == tmp_path / ".dovetail"
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "shared"))
    assert home_directory() == tmp_path / "shared"
    assert home_directory("own") == tmp_path / "own"


def test_many_processes_may_open_an_empty_store_at_once(tmp_path: Path) -> None:
    assert _open_at_once(str(tmp_path / "home")) == [0] * 4


# Forks: it takes a second to import what a millisecond is needed of.
OPENING = """
import importlib, os, sys
from dovetail.search.store import Store
for name in ("optuna.storages", "optuna.storages._rdb.storage", "alembic.command", *sys.argv[3:]):
    importlib.import_module(name)
for _ in range(4):
    if os.fork() == 0:
        Store.open(sys.argv[1], sys.argv[2] or None).experiments()
        os._exit(0)
print(*(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)))
"""


def _open_at_once(home: str, url: str = "", *modules: str) -> list[int]:
    command = [sys.executable, "-W", "error", "-c", OPENING, home, url, *modules]
    return [int(code) for code in subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()]


# ------------------------------------------------------------------ experiments


def test_a_new_experiment_has_its_files_and_no_trials(lab: Any) -> None:
    record = lab.create("pass", "grid", name="digits", hyperparameters=RANGES)
    assert (record.id, record.name, record.state, record.trials) == (1, "digits", "ACTIVE", ())
    assert not record.is_running
    assert datetime.now(timezone.utc) - record.created < timedelta(minutes=1)
    assert record.directory == lab.store.home / "experiments" / "1"
    assert sorted(os.listdir(record.directory)) == ["code", "config.json", "config.yaml", "trials"]
    assert json.loads((record.directory / "config.json").read_text()) == record.config
    assert record.config["hyperparameters"] == RANGES
    assert "name: digits" in (record.directory / "config.yaml").read_text()
    assert os.listdir(record.directory / "code") == ["trial.py"]


def test_two_experiments_may_have_the_same_name(lab: Any) -> None:
    first, second = (lab.create("pass", name="digits") for _ in range(2))
    assert [(each.id, each.name) for each in lab.store.experiments()] == [(1, "digits"), (2, "digits")]
    names = [study.study_name for study in optuna.get_all_study_summaries(lab.store.storage)]
    assert sorted(names) == ["digits", "digits #2"]
    assert first.directory != second.directory


def test_an_experiment_that_cannot_be_created_leaves_no_files(lab: Any, tmp_path: Path) -> None:
    from dovetail.search.schema import read_experiment

    config = read_experiment({"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}})
    with pytest.raises(ConfigError, match="does not exist"):
        lab.store.create_experiment(config, "", tmp_path / "nowhere")
    assert lab.store.experiments() == []
    assert not (lab.store.home / "experiments").exists() or os.listdir(lab.store.home / "experiments") == []


def test_an_unknown_experiment_id_raises_with_the_known_ones(lab: Any) -> None:
    record = lab.create("pass")
    numbers = [lab.store.add_trial(record.id, {}, {}, {}) for _ in range(3)]
    assert numbers == [1, 2, 3]
    looks: list[tuple[Callable[[], Any], str]] = [
        (lambda: lab.store.experiment(7), "there is no experiment 7: there is experiment 1"),
        (lambda: lab.store.trial(7), "there is no trial 7: there are trials 1 to 3"),
        (lambda: lab.store.job(7), "there is no job 7: there is none"),
    ]
    for look, sentence in looks:
        with pytest.raises(ExperimentError) as caught:
            look()
        assert str(caught.value) == sentence
    for number in (1, 3, 4, 5):
        folder = lab.store.home / "jobs" / str(number)
        folder.mkdir(parents=True)
        (folder / "job.json").touch()
    with pytest.raises(ExperimentError, match=r"^there is no job 2: there are jobs 1, 3 to 5$"):
        lab.store.job(2)


def test_an_unknown_request_suggests_the_nearest(lab: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown request 'pausse': did you mean 'pause'\?"):
        lab.store.request(lab.create("pass").id, "pausse")


def test_a_finished_experiment_is_deleted_with_its_files(lab: Any) -> None:
    record = lab.create("pass")
    with pytest.raises(ExperimentError, match="experiment 1 is ACTIVE: cancel it before it is deleted"):
        lab.store.delete(record.id)
    Runner(lab.store, record.id).run()
    lab.store.delete(record.id)
    assert lab.store.experiments() == []
    assert not record.directory.exists()
    # The number may be given again, and nothing of the old one is there.
    assert lab.create("pass").trials == ()


# ------------------------------------------------------------------ trials


def _tampered(lab: Any, **changes: str) -> Any:
    """Return an experiment that is over, and whose row in the database another program has changed."""
    record = lab.create("")
    lab.store.set_state(record.id, "CANCELED")
    row = lab.store.storage.get_study_user_attrs(record.id)["dovetail"]
    lab.store.storage.set_study_user_attr(record.id, "dovetail", {**row, **changes})
    return record


@pytest.mark.parametrize("key", ["directory", "trials"])
@pytest.mark.parametrize("place", ["victim", "home/experiments/1/../../../victim", "home", "link"])
def test_a_folder_outside_the_experiment_is_never_removed_or_written(lab: Any, key: str, place: str) -> None:
    victim = lab.folder / "victim"
    victim.mkdir()
    (victim / "file").touch()
    (lab.folder / "link").symlink_to(victim)
    record = _tampered(lab, **{key: str(lab.folder / place)})
    before = sorted(path for path in lab.folder.rglob("*"))
    with pytest.raises(ExperimentError, match=r"experiment 1: the store names the folder .*nothing is written or rem"):
        lab.store.delete(record.id)
    if key == "directory":
        for act in (
            lambda: lab.store.request(1, "pause"),
            lambda: Runner(lab.store, 1),
            lambda: start_detached(lab.store, 1),
        ):
            with pytest.raises(ExperimentError, match="the store names the folder"):
                act()
    assert sorted(path for path in lab.folder.rglob("*")) == before
    # The row can still be listed.
    assert [each.id for each in lab.store.experiments()] == [1]


@pytest.mark.parametrize("inside", [".", "trials"])
def test_a_link_in_place_of_the_experiment_folder_is_not_followed(lab: Any, inside: str) -> None:
    record = _tampered(lab)
    moved = lab.folder / "moved"
    (record.directory / inside).rename(moved)
    (record.directory / inside).symlink_to(moved)
    (moved / "file").touch()
    with pytest.raises(ExperimentError, match="the store names the folder"):
        lab.store.delete(record.id)
    assert (moved / "file").exists()


@pytest.mark.parametrize("storage", ["absolute", "relative"])
def test_trials_in_another_storage_are_deleted_with_their_experiment(
    lab: Any, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lab.folder)
    (lab.folder / "other").mkdir()
    place = lab.folder / "disk" if storage == "absolute" else Path("disk")
    done = lab.run("report(1, 0.5)", checkpoint_storage=str(place))
    assert done.trials[0].directory.is_relative_to(lab.folder / "disk")
    (lab.folder / "disk" / "other").mkdir()
    monkeypatch.chdir(lab.folder / "other")
    lab.store.delete(done.id)
    assert [path.name for path in (lab.folder / "disk").iterdir()] == ["other"]


def test_a_trial_whose_folder_is_a_link_is_not_run(lab: Any) -> None:
    (lab.folder / "victim").mkdir()
    record = lab.create("report(1, 0.5)")
    (record.directory / "trials" / "trial_1").symlink_to(lab.folder / "victim")
    (trial,) = Runner(lab.store, record.id).run().trials
    assert (trial.state, list((lab.folder / "victim").iterdir())) == ("ERROR", [])
    assert "is a link" in str(trial.reason)


@pytest.mark.parametrize("number", [-1, 2**31, 2**63, 10**20, 10**300])
def test_an_id_too_large_for_the_database_raises_a_one_sentence_error(lab: Any, number: int) -> None:
    for find in (lab.store.experiment, lab.store.trial, lab.store.job):
        with pytest.raises(ExperimentError, match=f"there is no [a-z]+ {number}: there is none"):
            find(number)


def test_a_stored_trial_survives_a_round_trip(lab: Any) -> None:
    store, experiment = lab.store, lab.create("pass", "grid", hyperparameters=RANGES)
    distributions = {"lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)}
    trial_id = store.add_trial(experiment.id, {"lr": 0.01}, distributions, {"lr": 0.01, "w": 1}, 4, {"bracket": 2})
    trial = store.trial(trial_id)
    assert (trial.number, trial.experiment_id, trial.state, trial.source) == (0, 1, "RUNNING", 4)
    assert trial.hparams == {"lr": 0.01, "w": 1}
    assert trial.directory == experiment.directory / "trials" / f"trial_{trial_id}"
    assert trial.started is not None
    assert abs(datetime.now(timezone.utc) - trial.started) < timedelta(minutes=1)
    for steps, value in ((10, 0.5), (20, 0.3), (30, 0.4)):
        store.add_value(trial_id, steps, value)
    store.update_trial(replace(trial, state="WAITING", restarts=2, steps=35))
    waiting = store.trial(trial_id)
    assert (waiting.state, waiting.restarts, waiting.steps, waiting.ended) == ("WAITING", 2, 35, None)
    assert (waiting.best, waiting.best_at, waiting.latest) == (0.3, 20, 0.4)
    store.end_trial(replace(waiting, state="STOPPED", reason="enough"))
    ended = store.trial(trial_id)
    assert (ended.state, ended.reason, ended.values) == ("STOPPED", "enough", {10: 0.5, 20: 0.3, 30: 0.4})
    assert ended.ended is not None
    assert store.experiment(1).trials == (ended,)


def test_the_best_trial_can_have_the_largest_value(lab: Any) -> None:
    script = "write({'group': 'validation', 'steps_completed': attempt + 1, 'metrics': {'accuracy': 0.5}}); "
    script += "write({'group': 'validation', 'steps_completed': 2, 'metrics': {'accuracy': 0.7}})"
    done = lab.run(script, {"name": "single", "metric": "accuracy", "smaller_is_better": False})
    assert (done.trials[0].best, done.trials[0].best_at) == (0.7, 2)
    assert lab.store.study(done.id).best_value == 0.7


def test_optuna_sees_parameters_ranges_values_and_states(lab: Any) -> None:
    script = f"{SCRIPT}\nif hparams['lr'] == 0.1: sys.exit(1)"
    done = lab.run(script, "grid", hyperparameters=RANGES, max_restarts=0)
    study = optuna.load_study(study_name=done.name, storage=f"sqlite:///{lab.store.home / 'store.db'}")
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.FAIL]
    assert [trial.params for trial in study.trials] == [
        {"lr": trial.hparams["lr"], "net.act": "relu"} for trial in done.trials
    ]
    first = study.trials[0]
    assert first.intermediate_values == {1: 0.001, 2: 0.0005}
    assert first.value == study.best_value == 0.0005
    lr = first.distributions["lr"]
    assert isinstance(lr, optuna.distributions.FloatDistribution)
    assert (lr.log, lr.low <= 0.001, lr.high >= 0.1) == (True, True, True)
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert "exit code 1" in study.trials[2].user_attrs["reason"]


# ------------------------------------------------------------------ jobs


def test_the_result_of_a_job_is_read_from_its_files(lab: Any) -> None:
    for number, code in ((1, "0"), (2, "3"), (10, "143")):
        folder = lab.store.home / "jobs" / str(number)
        attempt = Attempt.of(folder, 0)
        attempt.folder.mkdir(parents=True)
        (attempt.folder / "exit").write_text(code)
        (folder / "job.json").write_text(json.dumps({"name": "infer", "started": "2026-01-02T03:04:05+00:00"}))
    attempt.request_exit("cancel")
    assert [(job.id, job.state, job.exit_code) for job in lab.store.jobs()] == [
        (1, "COMPLETED", 0),
        (2, "ERROR", 3),
        (10, "CANCELED", 143),
    ]
    assert lab.store.job(1).started == datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def test_other_files_beside_jobs_are_ignored(lab: Any) -> None:
    for name in ("1 (copy)", "notes"):
        (lab.store.home / "jobs" / name).mkdir(parents=True)
        (lab.store.home / "jobs" / name / "job.json").write_text("{}")
    assert lab.store.jobs() == []


# ------------------------------------------------------------------ a server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with start_postgres() as url:
        yield url


@pytest.mark.slow
def test_many_processes_may_open_an_empty_database_server_at_once(server: str, tmp_path: Path) -> None:
    assert _open_at_once(str(tmp_path / "home"), server, "psycopg") == [0] * 4


@pytest.mark.slow
def test_an_experiment_on_a_database_server_equals_one_on_a_file(
    server: str, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_file = lab.run(SCRIPT, "grid", hyperparameters=RANGES)
    monkeypatch.setenv("DOVETAIL_STORE", server)
    lab.store = Store.open(lab.folder / "elsewhere")
    assert lab.store.storage.engine.name == "postgresql"
    on_server = lab.run(SCRIPT, "grid", hyperparameters=RANGES)
    assert on_server.state == "COMPLETED"
    assert [(trial.state, trial.hparams, trial.values, trial.best) for trial in on_server.trials] == [
        (trial.state, trial.hparams, trial.values, trial.best) for trial in on_file.trials
    ]
    assert on_server.trials[0].started is not None
    assert abs(datetime.now(timezone.utc) - on_server.trials[0].started) < timedelta(minutes=1)
    # A separate process receives the address of the server, too.
    monkeypatch.delenv("DOVETAIL_STORE")
    record = lab.create("report(1, 0.5)")
    assert start_detached(lab.store, record.id).wait(120) == 0
    assert lab.store.experiment(record.id).trials[0].values == {1: 0.5}
    lab.store.delete(on_server.id)
    assert [each.id for each in lab.store.experiments()] == [record.id]
    lab.store.storage.engine.dispose()


@pytest.mark.slow
def test_an_unreachable_server_raises_one_sentence_without_the_password(server: str, tmp_path: Path) -> None:
    place = server.rpartition("@")[2]
    with pytest.raises(ExperimentError) as raised:
        Store.open(tmp_path, f"postgresql://dovetail:wrong-secret@{place}")
    assert str(raised.value).startswith(f"the store at {place} cannot be opened: ")
    assert "wrong-secret" not in str(raised.value)


def test_a_store_that_is_not_a_url_raises_a_one_sentence_error(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="expected a URL such as postgresql://user@host/name"):
        Store.open(tmp_path, "somewhere")


def test_an_unreadable_address_raises_one_sentence_without_the_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="pip install 'psycopg[binary]'")
    with pytest.raises(ExperimentError, match=r"^the store at host:port/lab: expected a URL such as ") as raised:
        Store.open(tmp_path, "postgresql://me:tree-frog@host:port/lab")
    assert "frog" not in str(raised.value)
    # Nor in what a traceback would show.
    assert raised.value.__suppress_context__


def test_a_separate_runner_opens_the_given_study_file(lab: Any) -> None:
    lab.store = Store.open(lab.folder / "home", f"sqlite:///{lab.folder / 'other.db'}")
    record = lab.create("report(1, 0.5)")
    assert start_detached(lab.store, record.id).wait(120) == 0
    assert lab.store.experiment(record.id).trials[0].values == {1: 0.5}
