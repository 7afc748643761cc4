"""Running experiments: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.errors import ConfigError
from dovetail.search import locks, runner
from dovetail.search.checkpoints import latest_checkpoint
from dovetail.search.processes import Attempt, LocalBackend
from dovetail.search.records import ExperimentError, ExperimentRecord
from dovetail.search.report import report
from dovetail.search.runner import Runner, request
from dovetail.search.schema import read_experiment
from dovetail.search.searchers import SearcherKind, Suggestion, searchers
from dovetail.search.searchers.base import Searcher
from dovetail.search.starting import backend_for, command_of, trial_seed
from dovetail.search.store import Store

Until = Callable[[Callable[[], bool]], None]
GRID = {"lr": {"type": "categorical", "vals": [0.1, 0.2, 0.3]}}


def _codes(record: ExperimentRecord, number: int = 0) -> list[int | None]:
    return [attempt.exit_code for attempt in Attempt.all_of(record.trials[number].directory)]


def _is_waiting(store: Store, record: ExperimentRecord) -> bool:
    return any((trial.directory / "is_waiting").exists() for trial in store.experiment(record.id).trials)


# ------------------------------------------------------------------ to the end


def test_trials_report_their_metric_and_the_best_trial_is_found(lab: Any) -> None:
    done = lab.run("report(1, hparams['lr']); report(2, hparams['lr'] / 2)", "grid", hyperparameters=GRID)
    assert done.state == "COMPLETED"
    assert done.ended is not None
    assert [(trial.state, trial.hparams, trial.values) for trial in done.trials] == [
        ("COMPLETED", {"lr": lr}, {1: lr, 2: lr / 2}) for lr in (0.1, 0.2, 0.3)
    ]
    assert done.best_trial is not None
    assert (done.best_trial.number, done.best_trial.best, done.best_trial.best_at) == (0, 0.05, 2)


def test_the_later_of_two_reports_for_one_step_is_used(lab: Any) -> None:
    done = lab.run("report(1, 0.5); report(1, 0.4)")
    assert done.trials[0].values == {1: 0.4}


def test_a_metric_of_nan_is_stored_and_never_the_best(lab: Any) -> None:
    done = lab.run("report(1, 'NaN'); report(2, 3.0)")
    assert str(done.trials[0].values) == "{1: nan, 2: 3.0}"
    assert done.trials[0].best == 3.0


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("", "it reported no validation metrics"),
        ("write({'group': 'validation', 'steps_completed': 1, 'metrics': {'accuracy': 1}})", "reported accuracy"),
        ("write({'group': 'training', 'steps_completed': 1, 'metrics': {'loss': 1}})", "in the group 'training' only"),
    ],
)
def test_a_trial_that_never_reports_the_metric_fails_with_a_remedy(lab: Any, script: str, found: str) -> None:
    done = lab.run(script)
    (trial,) = done.trials
    assert (done.state, trial.state, trial.restarts, _codes(done)) == ("ERROR", "ERROR", 0, [0])
    assert trial.reason is not None
    assert trial.reason.startswith("it never reported the searcher's metric 'loss' (")
    assert found in trial.reason
    assert "report_validation_metrics(batches, {'loss': value})" in trial.reason


def test_without_a_metric_the_first_reported_number_is_compared(lab: Any) -> None:
    script = """
name = "other" if hparams["lr"] == 0.3 else "mse"
for step in (1, 2):
    values = {"epochs": step, "matrix": [1, 2], name: hparams["lr"] / step, "accuracy": 1 - hparams["lr"]}
    write({"group": "validation", "steps_completed": step, "metrics": values})
"""
    record = lab.create(script, {"name": "grid", "metric": None}, hyperparameters=GRID)
    assert (record.metric, record.metric_label) == ("", "first reported metric")
    # One at a time: the first trial names the metric for all.
    done = Runner(lab.store, record.id, LocalBackend(slots=1)).run()
    assert [trial.state for trial in done.trials] == ["COMPLETED"] * 3
    assert [trial.values for trial in done.trials] == [{1: 0.1, 2: 0.05}, {1: 0.2, 2: 0.1}, {}]
    assert (done.metric, done.metric_label) == ("mse", "mse (first reported, smaller is better)")
    assert done.best_trial is not None
    assert (done.best_trial.number, done.best_trial.best) == (0, 0.05)
    log = (done.directory / "runner.log").read_text()
    assert "trial 3: its validation reports no number 'mse', which the searcher needs" in log


@pytest.mark.parametrize("metrics", [{}, {"epochs": 1, "matrix": [1, 2]}])
def test_without_a_metric_a_trial_must_report_a_number(lab: Any, metrics: dict[str, Any]) -> None:
    script = f"write({{'group': 'validation', 'steps_completed': 1, 'metrics': {metrics}}})"
    record = lab.create(script, {"name": "single", "metric": None})
    (trial,) = Runner(lab.store, record.id).run().trials
    assert trial.state == "ERROR"
    assert trial.reason == (
        "it reported no validation metric: report one by context.train.report_validation_metrics(batches, "
        "{'loss': value}) of dovetail.core, or return it from evaluate_batch of a PyTorchTrial"
    )


def test_the_next_runner_uses_the_first_reported_metric(lab: Any, detached: Any, until: Until) -> None:
    script = """
name = ("mse", "late")[attempt]
write({"group": "validation", "steps_completed": attempt + 1, "metrics": {name: 0.5, "mse": 0.25}})
if attempt == 0:
    wait()
"""
    record = lab.create(script, {"name": "single", "metric": None})
    process = detached(record)
    until(lambda: bool(lab.store.experiment(record.id).first_metric) and _is_waiting(lab.store, record))
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    done = Runner(lab.store, record.id).run()
    assert (done.metric, done.trials[0].values) == ("mse", {1: 0.25, 2: 0.25})


# Without the prelude, which reads the file of the trial.
_REPORT = """
import json, os, pathlib
row = {"group": "validation", "steps_completed": 1, "metrics": {"loss": 1.0}}
pathlib.Path(os.environ["DOVETAIL_ATTEMPT"], "../../metrics.jsonl").write_text(json.dumps(row) + "\\n")
"""


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("", "ERROR"),
        ("from dovetail.info import get_cluster_info; get_cluster_info().config", "ERROR"),
        ("from dovetail.info import get_cluster_info; get_cluster_info().trial.hparams", "COMPLETED"),
        ("json.load(open(os.environ['DOVETAIL_TRIAL']))", "COMPLETED"),
    ],
)
def test_a_trial_that_reads_no_hyperparameter_fails_with_a_remedy(lab: Any, script: str, state: str) -> None:
    record = lab.create("", "grid", hyperparameters={"lr": {"type": "categorical", "vals": [0.1]}, "width": 8})
    (record.directory / "code" / "trial.py").write_text(_REPORT + script)
    (trial,) = Runner(lab.store, record.id).run().trials
    assert trial.state == state, trial.reason
    if state == "ERROR":
        assert trial.reason is not None
        assert trial.reason.startswith("it read no hyperparameter, so the searcher's choice of lr had no effect")
        assert "get_cluster_info().hparams" in trial.reason


def test_without_a_search_no_hyperparameter_needs_to_be_read(lab: Any) -> None:
    record = lab.create("", hyperparameters={"lr": 0.1})
    (record.directory / "code" / "trial.py").write_text(_REPORT)
    assert Runner(lab.store, record.id).run().trials[0].state == "COMPLETED"


def test_a_paused_trial_without_reports_has_not_failed(lab: Any, detached: Any, until: Until) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if attempt == 0:
    wait()
report(1, 0.5)
"""
    record = lab.create(script)
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert lab.store.experiment(record.id).trials[0].state == "WAITING"
    assert Runner(lab.store, record.id).run().trials[0].state == "COMPLETED"


@pytest.mark.parametrize("epochs", ["'NaN'", "'Infinity'", "None", "-1", "1e300"])
def test_a_metric_without_a_step_is_stored_with_a_warning(lab: Any, epochs: str) -> None:
    searcher = {"name": "async_halving", "num_rungs": 1, "max_trials": 2, "max_length": {"epochs": 4}}
    done = lab.run(f"report(1, 0.5, epochs={epochs})", searcher)
    assert [(trial.state, trial.values) for trial in done.trials] == [("COMPLETED", {1: 0.5})] * 2
    assert done.best_trial is not None
    (warning,) = done.warnings
    assert warning.startswith("trials report 'loss' without a number 'epochs', by which the searcher async_halving")
    assert "{'loss': …, 'epochs': …}" in warning


# ------------------------------------------------------------------ lines that are no reports

_BAD_LINES = {
    "nested more than 32 levels deep": b"[" * 100_000,
    "nested more than 32 levels deep;": b'{"group": ' + b"[" * 40 + b"]" * 40 + b"}",
    "a whole number of more than 64 bits": b'{"progress": 1' + b"0" * 30 + b"}",
    "a whole number of more than 64 bits;": b'{"group": "g", "steps_completed": 1' + b"0" * 5000 + b', "metrics": {}}',
    "steps_completed: expected a whole number": b'{"group": "g", "steps_completed": 4294967296, "metrics": {}}',
    "text with half of a surrogate pair": b'{"status": "\\ud800"}',
    "the constant NaN is not JSON": b'{"group": "validation", "steps_completed": 1, "metrics": {"loss": NaN}}',
    "expected an object, got list": b"[1, 2]",
    "not valid UTF-8": b"\xff\xfe",
    "expected a report with one of group": b'{"loss": 1}',
    "expected a name under 'group'": b'{"group": "validation", "steps_completed": 1, "metrics": [1]}',
    "progress: expected a number from 0 to 1": b'{"progress": 7}',
    "status: expected text": b'{"status": 7}',
}


def test_an_invalid_report_line_is_logged_and_the_experiment_continues(lab: Any) -> None:
    lines = b"\n".join(_BAD_LINES.values()) + b"\n"
    record = lab.create("report(1, 0.5)\n(folder / 'metrics.jsonl').open('ab').write(Path('lines').read_bytes())")
    (record.directory / "code" / "lines").write_bytes(lines)
    (trial,) = Runner(lab.store, record.id).run().trials
    assert (trial.state, trial.values) == ("COMPLETED", {1: 0.5})
    log = (trial.directory / "log.txt").read_text().splitlines()
    assert len(log) == len(_BAD_LINES)
    for number, (reason, line) in enumerate(zip(_BAD_LINES, log, strict=True), 2):
        assert line.startswith(f"dovetail: metrics.jsonl, line {number}: {reason.rstrip(';')}"), line


def test_an_invalid_report_line_is_logged_once_by_two_runners(lab: Any, detached: Any, until: Until) -> None:
    script = "write([1])\nwait() if attempt == 0 else report(1, 0.5)"
    record = lab.create(script)
    process = detached(record)
    until(lambda: "line 1" in _log_of(lab.store, record))
    request(lab.store, record.id, "pause")
    process.wait()
    assert Runner(lab.store, record.id).run().trials[0].state == "COMPLETED"
    assert _log_of(lab.store, record).count("metrics.jsonl, line 1:") == 1


def _log_of(store: Store, record: ExperimentRecord) -> str:
    paths = [trial.directory / "log.txt" for trial in store.experiment(record.id).trials]
    return "".join(path.read_text() for path in paths if path.exists())


@pytest.mark.parametrize("make", ["os.mkfifo(path)", "os.mkdir(path)", "os.symlink('/dev/zero', path)"])
def test_a_trial_with_unreadable_reports_fails_alone(lab: Any, make: str) -> None:
    script = f"path = folder / 'metrics.jsonl'\nif hparams['lr'] == 0.1: {make}\nelse: report(1, hparams['lr'])"
    done = lab.run(script, "grid", hyperparameters=GRID)
    assert [trial.state for trial in done.trials] == ["ERROR", "COMPLETED", "COMPLETED"]
    assert "its reports cannot be read" in str(done.trials[0].reason)


def test_a_trial_receives_its_id_in_its_environment(lab: Any) -> None:
    done = lab.run(
        "print(json.dumps([info, os.environ['DOVETAIL_HOME'], os.environ['COLOUR'], os.environ['OMP_NUM_THREADS']]))",
        hyperparameters={"net": {"width": 8}},
        data={"rows": 3},
        environment={"environment_variables": ["COLOUR=red"]},
        reproducibility={"experiment_seed": 5},
    )
    trial = done.trials[0]
    info, home, colour, threads = json.loads((trial.directory / "log.txt").read_text())
    assert (info["trial_id"], info["experiment_id"]) == (trial.id, done.id)
    assert info["hparams"] == {"net": {"width": 8}}
    assert info["user_data"] == {"rows": 3}
    assert info["config"]["searcher"]["metric"] == "loss"
    assert info["trial_seed"] == trial_seed(5, 0)
    assert info["latest_checkpoint"] is None
    assert (home, colour) == (str(lab.store.home), "red")
    assert int(threads) >= 1


def test_trials_run_in_the_code_snapshot(lab: Any) -> None:
    record = lab.create("import helper; report(1, helper.LOSS)")
    (record.directory / "code" / "helper.py").write_text("LOSS = 0.25")
    (lab.folder / "code" / "trial.py").write_text("raise SystemExit(1)")
    assert Runner(lab.store, record.id).run().trials[0].best == 0.25


def test_the_number_of_running_trials_does_not_exceed_the_slots(lab: Any) -> None:
    script = """
place = folder.parent / "at_work"
place.mkdir(exist_ok=True)
(place / folder.name).touch()
# The first two see each other; a third one beside them would be seen, too.
if int(folder.name.removeprefix("trial_")) < 3:
    while len(list(place.iterdir())) < 2 and not list(folder.parent.glob("*/is_over")):
        time.sleep(0.01)
print(len(list(place.iterdir())))
(folder / "is_over").touch()
(place / folder.name).unlink()
"""
    done = lab.run(script, "grid", hyperparameters=GRID, resources={"slots_per_trial": 1})
    assert max(int((trial.directory / "log.txt").read_text()) for trial in done.trials) == 2


def test_a_finished_experiment_is_not_run_again(lab: Any) -> None:
    done = lab.run("report(1, 0.5)")
    assert Runner(lab.store, done.id).run() == done
    assert _codes(done) == [0]


def test_an_observer_receives_the_experiment_during_and_after_the_run(lab: Any) -> None:
    seen: list[ExperimentRecord] = []
    record = lab.create(
        "write({'group': 'training', 'steps_completed': 7, 'metrics': {}})\n"
        "while not (folder / 'seen').exists(): time.sleep(0.01)\n"
        "report(7, 0.5)"
    )

    def see(shown: ExperimentRecord) -> None:
        seen.append(shown)
        for trial in shown.trials:
            if trial.steps == 7:
                (trial.directory / "seen").touch()

    Runner(lab.store, record.id, observer=see).run()
    (first, *_) = [shown for shown in seen if shown.trials]
    assert (first.state, first.is_running, first.trials[0].state) == ("ACTIVE", True, "RUNNING")
    assert seen[-2].trials[0].steps == 7
    assert [shown.state for shown in seen].count("COMPLETED") == 1
    assert seen[-1].state == "COMPLETED"


def test_trials_are_in_the_checkpoint_storage_and_linked_in_the_experiment(lab: Any) -> None:
    done = lab.run("report(1, 0.5)", checkpoint_storage={"type": "directory", "container_path": f"{lab.folder}/far"})
    trial = done.trials[0]
    assert trial.directory.parent.parent == lab.folder / "far"
    # Another store with an experiment of this number has another folder there.
    assert re.fullmatch(rf"experiment_{done.id}-[0-9a-f]{{6}}", trial.directory.parent.name)
    assert trial.directory.name == f"trial_{trial.id}"
    assert (done.directory / "trials" / trial.directory.name / "metrics.jsonl").exists()
    lab.store.delete(done.id)
    assert not trial.directory.exists()


TRAINED = """
done = json.loads((folder / "place").read_text()) if (folder / "place").exists() else 0
for steps in range(done + 1, 5):
    report(steps, hparams["lr"] / steps)
    (folder / "place").write_text(json.dumps(steps))
"""
STOPPING = {"max_time": 4, "time_metric": "batches", "divisor": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("single", {}),
        ("grid", {}),
        ("random", {"max_trials": 4}),
        ("async_halving", {"max_trials": 4, "num_rungs": 2, **STOPPING}),
        ("adaptive_asha", {"max_trials": 4, **STOPPING}),
        ("tpe", {"max_trials": 4, "num_startup_trials": 2}),
        ("gp", {"max_trials": 4, "num_startup_trials": 2}),
        ("cmaes", {"max_trials": 4}),
        ("hyperband", {"max_trials": 4, **STOPPING}),
        (
            "pbt",
            {
                "population_size": 4,
                "truncate_fraction": 0.25,
                "num_rounds": 2,
                "max_time": 4,
                "time_metric": "batches",
            },
        ),
    ],
)
def test_every_searcher_terminates(lab: Any, name: str, options: dict[str, Any]) -> None:
    lr: Any = {"type": "double", "minval": 0, "maxval": 1, "count": 4}
    done = lab.run(TRAINED, {"name": name, **options}, hyperparameters={"lr": 0.5 if name == "single" else lr})
    assert done.state == "COMPLETED"
    # Trials of a population that end have successors.
    assert len(done.trials) == (1 if name == "single" else 4) or (name == "pbt" and 4 < len(done.trials) <= 8)
    assert {trial.state for trial in done.trials} <= {"COMPLETED", "STOPPED"}
    assert done.best_trial is not None
    assert done.best_trial.best == pytest.approx(min(trial.hparams["lr"] / max(trial.values) for trial in done.trials))


# ------------------------------------------------------------------ failures


def test_a_failing_trial_is_restarted_up_to_its_limit(lab: Any) -> None:
    done = lab.run("print('the loss exploded at', attempt); sys.exit(3)", max_restarts=2)
    trial = done.trials[0]
    assert (trial.state, trial.restarts, _codes(done)) == ("ERROR", 2, [3, 3, 3])
    assert trial.reason == "attempt 2 ended with exit code 3: the loss exploded at 2"
    assert (done.state, done.reason) == ("ERROR", "no trial has succeeded")


MISTAKE = "hparams['learning_rate']"


def test_a_trial_that_fails_twice_equally_without_progress_is_not_restarted(lab: Any) -> None:
    done = lab.run(MISTAKE)
    trial = done.trials[0]
    assert (trial.state, trial.restarts, _codes(done)) == ("ERROR", 1, [1, 1])
    assert trial.reason == (
        "attempts 0 and 1 ended in the same way, with exit code 1 and no progress in between: KeyError: 'learning_rate'"
    )


@pytest.mark.parametrize(
    ("script", "codes"),
    [
        # It comes further every time.
        (f"report(attempt + 1, 0.5); {MISTAKE}", [1, 1, 1, 1]),
        # The same metrics again are no progress.
        (f"report(1, 0.5); {MISTAKE}", [1, 1]),
        # Another exit code, another error.
        ("sys.exit(1 + attempt)", [1, 2, 3, 4]),
        ("raise ValueError(attempt)", [1, 1, 1, 1]),
        # The address of an object is not part of the failure.
        ("raise ValueError(object())", [1, 1]),
        # An interruption is not a failure of the trial.
        ("os.kill(os.getpid(), signal.SIGKILL)", [137, 137, 137, 137]),
        ("os.kill(os.getppid(), signal.SIGKILL); wait()", [None, None, None, None]),
        # Not in a row.
        (f"if attempt == 1: os.kill(os.getpid(), signal.SIGKILL)\n{MISTAKE}", [1, 137, 1, 1]),
    ],
)
def test_only_an_equal_failure_at_the_same_step_counts_as_repeated(
    lab: Any, script: str, codes: list[int | None]
) -> None:
    done = lab.run(script, max_restarts=3)
    assert (done.trials[0].state, _codes(done)) == ("ERROR", codes)


def test_a_new_checkpoint_counts_as_progress(lab: Any) -> None:
    for steps in (1, 2, 3):
        _stored(lab.folder / "given", steps)
    copied = f"shutil.copytree({str(lab.folder / 'given')!r} + f'/ck_{{attempt + 1}}', folder / f'ck_{{attempt + 1}}')"
    done = lab.run(f"if attempt < 3: {copied}\n{MISTAKE}")
    assert (done.trials[0].state, _codes(done)) == ("ERROR", [1, 1, 1, 1])


def test_a_failure_is_known_to_the_next_runner(lab: Any, detached: Any, until: Until) -> None:
    waits = "(folder / 'is_waiting').touch()\n    while not (folder / 'go').exists(): time.sleep(0.01)"
    script = f"if attempt == 1:\n    {waits}\n{MISTAKE}"
    record = lab.create(script)
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    process.kill()
    (lab.store.experiment(record.id).trials[0].directory / "go").touch()
    done = Runner(lab.store, record.id).run()
    assert (done.trials[0].state, _codes(done)) == ("ERROR", [1, 1])


def test_an_attempt_seen_by_two_runners_fails_once(lab: Any) -> None:
    class Killed(BaseException):
        """Simulates a signal that ends the runner."""

    class Dying(LocalBackend):
        def start(self, attempt: Attempt, *arguments: Any) -> None:
            if attempt.number == 1:
                raise Killed
            super().start(attempt, *arguments)

    record = lab.create(f"if attempt < 2: {MISTAKE}\nreport(1, 0.5)", max_restarts=1)
    with pytest.raises(Killed):
        Runner(lab.store, record.id, Dying()).run()
    assert _codes(lab.store.experiment(record.id)) == [1]
    done = Runner(lab.store, record.id).run()
    assert _codes(done) == [1, 1]
    assert done.trials[0].reason is not None
    assert done.trials[0].reason.startswith("attempts 0 and 1 ended in the same way")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sys.exit('too much')", "too much"),
        ("raise ValueError('too much')", "ValueError: too much"),
        (
            "try:\n    {}['a']\nexcept KeyError as error:\n"
            "    error.__notes__ = ['with lr 0.1', 'and depth 2']\n    raise",
            "KeyError: 'a'",
        ),
        ("try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('b')", "ValueError: b"),
        # The run continued after that error.
        (
            "import traceback\ntry:\n    {}['a']\nexcept KeyError: traceback.print_exc()\n"
            "print('epoch\\n' * 30)\nsys.exit('enough')",
            "enough",
        ),
        # Of another attempt.
        ("if attempt == 0: raise ValueError('too much')\nsys.exit('enough')", "enough"),
    ],
)
def test_the_failure_reason_of_a_trial_is_its_error(lab: Any, script: str, words: str) -> None:
    reason = lab.run(script, max_restarts=1).trials[0].reason
    assert reason is not None
    assert reason.endswith(f": {words}")


def test_a_trial_that_fails_once_completes(lab: Any) -> None:
    done = lab.run("report(1, 0.5); sys.exit(1 if attempt == 0 else 0)")
    assert (done.state, done.trials[0].state, done.trials[0].restarts, _codes(done)) == (
        *("COMPLETED", "COMPLETED", 1),
        [1, 0],
    )


def test_one_failed_trial_does_not_fail_the_experiment(lab: Any) -> None:
    done = lab.run("report(1, 0.5); sys.exit(hparams['lr'] == 0.1)", "grid", hyperparameters=GRID, max_restarts=0)
    assert done.state == "COMPLETED"
    assert [trial.state for trial in done.trials] == ["ERROR", "COMPLETED", "COMPLETED"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_external_signal_is_a_failure(lab: Any, number: int) -> None:
    done = lab.run(f"if attempt == 0: os.kill(os.getpid(), {int(number)})\nreport(1, 0.5)")
    assert (done.trials[0].state, done.trials[0].restarts, _codes(done)) == ("COMPLETED", 1, [128 + number, 0])


def test_a_trial_whose_shell_is_killed_is_restarted_without_leftovers(lab: Any) -> None:
    script = """
if attempt == 0:
    (folder / "child").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    wait()
report(1, 0.5)
"""
    done = lab.run(script)
    assert (done.trials[0].state, _codes(done)) == ("COMPLETED", [None, 0])
    child = int((done.trials[0].directory / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_reports_repeated_after_a_restart_reach_the_searcher_once(lab: Any) -> None:
    told: list[tuple[int, int, float]] = []

    class Listening(Searcher):
        def suggest(self, study: Any, number: int) -> Suggestion | None:
            return Suggestion({}) if number == 0 else None

        def on_validation(self, number: int, time: int, value: float) -> bool:
            told.append((number, time, value))
            return True

        def is_over(self) -> bool:
            return True

    searchers.register("listening", SearcherKind(lambda config, space, seed: Listening()))
    lab.run("report(1, 0.5); report(2, 0.4)\nif attempt == 0: sys.exit(1)\nreport(3, 0.3)", "listening")
    assert told == [(0, 1, 0.5), (0, 2, 0.4), (0, 3, 0.3)]


def test_a_trial_with_invalid_hyperparameters_is_replaced(lab: Any) -> None:
    script = "write({'exited': 'INVALID_HP'}) if folder.name == 'trial_1' else report(1, 0.5)"
    ranges = {"lr": {"type": "double", "minval": 0, "maxval": 1}}
    done = lab.run(script, {"name": "random", "max_trials": 2}, hyperparameters=ranges)
    assert [trial.state for trial in done.trials] == ["INVALID_HP", "COMPLETED", "COMPLETED"]
    assert (done.state, _codes(done)) == ("COMPLETED", [0])


# ------------------------------------------------------------------ checkpoints


def _stored(folder: Path, steps: int) -> Path:
    from dovetail.checkpoint import save

    return save(folder / f"ck_{steps}", {"weight": [steps]}, summary={"batches": steps})


def test_a_trial_continues_from_its_newest_intact_checkpoint(lab: Any) -> None:
    for steps in (1, 2, 3):
        _stored(lab.folder / "given", steps)
    (lab.folder / "given" / "ck_3" / "state.json").write_text("{}")
    script = f"""
if attempt == 0:
    shutil.copytree({str(lab.folder / "given")!r}, folder, dirs_exist_ok=True)
    sys.exit(1)
(folder / "from").write_text(info["latest_checkpoint"])
"""
    trial = lab.run(script).trials[0]
    assert (trial.directory / "from").read_text() == str(trial.directory / "ck_2")


def test_a_core_api_script_receives_the_id_of_its_newest_checkpoint(lab: Any) -> None:
    from dovetail.core.checkpoint import CheckpointContext

    context = CheckpointContext(lab.folder / "given")
    for steps in (1, 2):
        with context.store_path({"steps_completed": steps}) as (path, newest):
            (path / "weights.txt").write_text("0.5")
    with context.store_path({"steps_completed": 3}) as (path, damaged):
        (path / "weights.txt").write_text("0.6")
    (lab.folder / "given" / damaged / "files" / "weights.txt").write_text("0.7")
    script = f"""
if attempt == 0:
    shutil.copytree({str(lab.folder / "given")!r}, folder, dirs_exist_ok=True)
    sys.exit(1)
(folder / "from").write_text(info["latest_checkpoint"])
"""
    trial = lab.run(script, checkpoint_storage={"save_trial_latest": 3}).trials[0]
    assert (trial.directory / "from").read_text() == newest
    found = latest_checkpoint(trial.directory)
    assert found is not None
    assert found.steps == 2


class Following(Searcher):
    """The second trial starts from the checkpoint of the first."""

    def __init__(self) -> None:
        self.num_ended = 0

    def suggest(self, study: Any, number: int) -> Suggestion | None:
        if number > self.num_ended or number > 1:
            return None
        return Suggestion({}, source=0 if number else None)

    def on_exit(self, number: int, state: str) -> None:
        self.num_ended += 1

    def is_over(self) -> bool:
        return self.num_ended > 1


def test_a_trial_may_start_from_the_checkpoint_of_another_trial(lab: Any) -> None:
    searchers.register("following", SearcherKind(lambda config, space, seed: Following()))
    _stored(lab.folder / "given", 4)
    script = f"""
if info["latest_checkpoint"] is None:
    shutil.copytree({str(lab.folder / "given")!r}, folder, dirs_exist_ok=True)
else:
    (folder / "from").write_text(info["latest_checkpoint"])
"""
    first, second = lab.run(script, "following").trials
    assert second.source == 0
    assert (second.directory / "from").read_text() == str(first.directory / "ck_4")


def test_all_trials_may_start_from_a_checkpoint_of_an_earlier_experiment(lab: Any) -> None:
    _stored(lab.folder / "given", 4)
    first = lab.run(f"shutil.copytree({str(lab.folder / 'given')!r}, folder, dirs_exist_ok=True)").trials[0]
    second = lab.run("print(info['latest_checkpoint'])", {"name": "single", "source_trial_id": first.id}).trials[0]
    assert (second.directory / "log.txt").read_text().strip() == str(first.directory / "ck_4")


def test_a_missing_source_checkpoint_warns(lab: Any) -> None:
    first = lab.run("report(1, 0.5)").trials[0]
    done = lab.run("report(1, 0.5)", {"name": "single", "source_trial_id": first.id})
    assert done.trials[0].state == "COMPLETED"
    expected = "trial_1 has no intact checkpoint, so trials that should continue from it start from scratch"
    assert done.warnings == (expected,)


def test_checkpoints_that_no_rule_keeps_are_removed_at_the_end_of_a_trial(lab: Any) -> None:
    for steps in (1, 2, 3, 4):
        _stored(lab.folder / "given", steps)
    script = f"""
shutil.copytree({str(lab.folder / "given")!r}, folder, dirs_exist_ok=True)
report(1, 0.5), report(2, hparams["lr"]), report(3, 0.6)
"""
    kept = {"type": "directory", "container_path": str(lab.folder / "far"), "save_trial_best": 1}
    done = lab.run(script, "grid", hyperparameters=GRID, checkpoint_storage=kept)
    for trial in done.trials:
        assert sorted(path.name for path in trial.directory.glob("ck_*")) == ["ck_2", "ck_4"]
    only_best = {**kept, "save_trial_best": 0, "save_trial_latest": 0, "save_experiment_best": 2}
    done = lab.run(script, "grid", hyperparameters=GRID, checkpoint_storage=only_best)
    left = [[path.name for path in trial.directory.glob("ck_*")] for trial in done.trials]
    assert left == [["ck_2"], ["ck_2"], []]


def test_the_newest_intact_checkpoint_is_kept_among_damaged_ones(lab: Any) -> None:
    for steps in (1, 2, 3):
        _stored(lab.folder / "given", steps)
    (lab.folder / "given" / "ck_3" / "state.json").write_text("{}")
    script = f"shutil.copytree({str(lab.folder / 'given')!r}, folder, dirs_exist_ok=True)"
    trial = lab.run(script, checkpoint_storage={"save_trial_latest": 1}).trials[0]
    # The damaged checkpoint is kept for inspection.
    assert sorted(path.name for path in trial.directory.glob("ck_*")) == ["ck_2", "ck_3"]
    found = latest_checkpoint(trial.directory)
    assert found is not None
    assert found.path.name == "ck_2"


# ------------------------------------------------------------------ progress and secrets


def test_progress_is_shown_while_a_trial_runs_and_stored(lab: Any) -> None:
    seen: list[float | None] = []
    script = "write({'progress': 0.25})\nwhile not (folder / 'seen').exists(): time.sleep(0.01)\nwrite({'progress': 1})"
    record = lab.create(script)

    def see(shown: ExperimentRecord) -> None:
        for trial in shown.trials:
            seen.append(trial.progress)
            if trial.progress == 0.25:
                (trial.directory / "seen").touch()

    done = Runner(lab.store, record.id, observer=see).run()
    assert 0.25 in seen
    assert done.trials[0].progress == 1


def test_the_status_of_a_trial_is_shown_while_it_runs_and_stored(lab: Any) -> None:
    seen: list[str | None] = []
    wait = "while not (folder / 'seen').exists(): time.sleep(0.01)"
    record = lab.create(f"write({{'status': 'downloading'}})\n{wait}\nwrite({{'status': 'x' * 1000}})")

    def see(shown: ExperimentRecord) -> None:
        for trial in shown.trials:
            seen.append(trial.status)
            if trial.status == "downloading":
                (trial.directory / "seen").touch()

    done = Runner(lab.store, record.id, observer=see).run()
    assert "downloading" in seen
    # A trial cannot fill the store with its status.
    assert done.trials[0].status == "x" * 199 + "…"


def test_readers_of_the_store_see_progress_too(lab: Any, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_SHOWN_EVERY", 0.0)
    go = lab.folder / "go"
    script = "write({'progress': 0.25})\n" + f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    record = lab.create(script)
    seen = threading.Event()

    def look() -> None:
        other = Store.open(lab.store.home)
        until(lambda: [trial.progress for trial in other.experiment(record.id).trials] == [0.25])
        seen.set()
        go.touch()

    looking = threading.Thread(target=look)
    looking.start()
    Runner(lab.store, record.id).run()
    looking.join()
    assert seen.is_set()


@pytest.mark.filterwarnings("ignore:keys without an effect here")
def test_secrets_reach_the_trial_and_are_in_no_record(lab: Any) -> None:
    done = lab.run(
        "report(1, 0.5); (folder / 'heard').write_text(os.environ['TOKEN'] + json.dumps(info))",
        environment={"environment_variables": {"TOKEN": "tree-frog"}},
        checkpoint_storage={"type": "shared_fs", "host_path": str(lab.folder / "far"), "access_key": "tree-toad"},
    )
    trial = done.trials[0]
    heard = (trial.directory / "heard").read_text()
    assert heard.startswith("tree-frog{")
    assert "tree-" not in heard[9:]
    assert done.config["environment"] == {"environment_variables": {"TOKEN": "***"}}
    assert done.config["checkpoint_storage"]["access_key"] == "***"
    (trial.directory / "heard").unlink()
    report(done, done.directory / "report.html")
    home, far = lab.store.home, lab.folder / "far"
    files = [path for folder in (home, far) for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files if b"tree-" in path.read_bytes()} == {"config.yaml", "config.json"}
    private = [path for path in files if path.name in ("config.yaml", "config.json", "info.json")]
    assert len(private) == 3
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}


# ------------------------------------------------------------------ leaving early

HALVING = {"name": "async_halving", "num_rungs": 2, "max_trials": 2, "max_time": 4, "divisor": 2}
STOPPED = """
def leave(number, frame):
    (folder / "saved").touch()
    sys.exit(CODE)

signal.signal(signal.SIGTERM, leave)
# The first trial is the better one, and all of it is there before the second one begins.
report(2, info["trial_id"])
if info["trial_id"] > 1:
    wait()
report(4, info["trial_id"])
"""


@pytest.mark.parametrize("code", [143, 0, 1])
def test_a_trial_stopped_by_the_searcher_saves_and_exits(lab: Any, code: int) -> None:
    done = lab.run(
        STOPPED.replace("CODE", str(code)),
        {**HALVING, "time_metric": "batches", "max_concurrent_trials": 1},
        hyperparameters={"lr": {"type": "double", "minval": 0, "maxval": 1}},
    )
    assert [(trial.state, trial.values) for trial in done.trials] == [
        ("COMPLETED", {2: 1, 4: 1}),
        ("STOPPED", {2: 2}),
    ]
    assert (done.trials[1].directory / "saved").exists()
    assert (_codes(done, 1), done.trials[1].restarts) == ([code], 0)
    assert done.trials[1].reason == "stopped by the searcher for its value after 2 batches"


SLOW = """
def leave(number, frame):
    (folder / "saved").write_text(str(attempt))
    sys.exit(143)

signal.signal(signal.SIGTERM, leave)
report(1, 0.5)
if attempt == 0:
    wait()
"""


def test_a_paused_experiment_continues(lab: Any, detached: Any, until: Until) -> None:
    record = lab.create(SLOW)
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    lab.store.request(record.id, "pause")
    assert process.wait() == 0
    paused = lab.store.experiment(record.id)
    assert (paused.state, paused.is_running, paused.trials[0].state) == ("PAUSED", False, "WAITING")
    assert (paused.trials[0].directory / "saved").read_text() == "0"
    done = Runner(lab.store, record.id).run()
    assert (done.state, done.trials[0].state, done.trials[0].restarts) == ("COMPLETED", "COMPLETED", 0)
    assert _codes(done) == [143, 0]


def test_a_paused_script_that_exits_with_0_reports_it_by_a_file(lab: Any, detached: Any, until: Until) -> None:
    script = SLOW.replace("sys.exit(143)", "Path(os.environ['DOVETAIL_ATTEMPT'], 'preempted').touch(); sys.exit(0)")
    record = lab.create(script)
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    request(lab.store, record.id, "pause")
    assert process.wait() == 0
    assert lab.store.experiment(record.id).trials[0].state == "WAITING"
    assert Runner(lab.store, record.id).run().trials[0].state == "COMPLETED"


@pytest.mark.parametrize(("wish", "saves"), [("cancel", True), ("kill", False)])
def test_a_canceled_experiment_is_finished(lab: Any, detached: Any, until: Until, wish: str, saves: bool) -> None:
    record = lab.create(SLOW if saves else SLOW.replace("sys.exit(143)", "wait()"))
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    request(lab.store, record.id, wish)
    assert process.wait() == 0
    done = lab.store.experiment(record.id)
    assert (done.state, done.trials[0].state) == ("CANCELED", "CANCELED")
    assert (done.trials[0].directory / "saved").exists() or not saves
    assert Runner(lab.store, record.id).run().state == "CANCELED"


def test_a_paused_experiment_without_its_cluster_remains_paused(lab: Any) -> None:
    record = lab.create("report(1, 0.5)", resources={"cluster": "nowhere"})
    lab.store.set_state(record.id, "PAUSED")
    with pytest.raises(ConfigError, match="got 'nowhere'"):
        Runner(lab.store, record.id).run()
    assert lab.store.experiment(record.id).state == "PAUSED"


def test_a_request_that_is_already_fulfilled_runs_nothing(lab: Any) -> None:
    record = lab.create("report(1, 0.5)")
    assert request(lab.store, record.id, "pause").state == "PAUSED"
    assert request(lab.store, record.id, "pause").state == "PAUSED"
    assert lab.store.experiment(record.id).trials == ()
    assert Runner(lab.store, record.id).run().state == "COMPLETED"
    assert request(lab.store, record.id, "cancel").state == "COMPLETED"


def test_ctrl_c_pauses_an_experiment(lab: Any, detached: Any, until: Until) -> None:
    record = lab.create(SLOW)
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    paused = lab.store.experiment(record.id)
    assert (paused.state, paused.trials[0].state, _codes(paused)) == ("PAUSED", "WAITING", [143])


def test_a_second_ctrl_c_kills_trials_that_do_not_exit(lab: Any, detached: Any, until: Until) -> None:
    record = lab.create(SLOW.replace("sys.exit(143)", "wait()"))
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    process.send_signal(signal.SIGINT)
    until(lambda: (lab.store.experiment(record.id).trials[0].directory / "saved").exists())
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    paused = lab.store.experiment(record.id)
    assert (paused.state, paused.reason, _codes(paused)) == ("PAUSED", "trials were killed", [None])
    assert Runner(lab.store, record.id).run().trials[0].state == "COMPLETED"


# ------------------------------------------------------------------ one runner after another


def test_an_experiment_has_one_runner(lab: Any, detached: Any, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    record = lab.create(SLOW)
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    with pytest.raises(ExperimentError, match=f"experiment 1 is already run by process {process.pid}"):
        Runner(lab.store, record.id).run()


def test_trials_of_a_killed_runner_are_adopted_by_the_next(lab: Any, detached: Any, until: Until) -> None:
    wait = "while not (folder / 'go').exists(): time.sleep(0.01)"
    record = lab.create(f"(folder / 'is_waiting').touch()\n{wait}\nreport(1, 0.5)")
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    process.kill()
    again = detached(record)
    until(lambda: lab.store.experiment(record.id).is_running)
    (lab.store.experiment(record.id).trials[0].directory / "go").touch()
    assert again.wait() == 0
    done = lab.store.experiment(record.id)
    assert (done.trials[0].state, done.trials[0].restarts, _codes(done)) == ("COMPLETED", 0, [0])


def test_trials_of_a_killed_runner_can_be_canceled(lab: Any, detached: Any, until: Until) -> None:
    record = lab.create(SLOW)
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    process.kill()
    done = request(lab.store, record.id, "cancel")
    assert (done.state, done.trials[0].state, _codes(done)) == ("CANCELED", "CANCELED", [143])


def test_a_pending_stop_of_a_trial_is_sent_by_the_next_runner(lab: Any, detached: Any, until: Until) -> None:
    record = lab.create(SLOW)
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    process.kill()
    Attempt.of(lab.store.experiment(record.id).trials[0].directory, 0).request_exit("pause")
    done = Runner(lab.store, record.id).run()
    assert (done.trials[0].state, _codes(done), done.trials[0].restarts) == ("COMPLETED", [143, 0], 0)


def test_reports_of_a_trial_without_a_runner_are_read_later(lab: Any, detached: Any, until: Until) -> None:
    record = lab.create(
        "wait_for = folder / 'go'\n(folder / 'is_waiting').touch()\n"
        "while not wait_for.exists(): time.sleep(0.01)\nreport(1, 0.5); report(2, 0.4)"
    )
    process = detached(record)
    until(lambda: _is_waiting(lab.store, record))
    process.kill()
    trial = lab.store.experiment(record.id).trials[0]
    (trial.directory / "go").touch()
    until(lambda: Attempt.of(trial.directory, 0).exit_code == 0)
    done = Runner(lab.store, record.id).run()
    assert (done.trials[0].state, done.trials[0].values) == ("COMPLETED", {1: 0.5, 2: 0.4})


# ------------------------------------------------------------------ commands


@pytest.mark.parametrize(
    ("entrypoint", "slots", "expected"),
    [
        (["python3", "train.py", "--fast"], 1, [sys.executable, "train.py", "--fast"]),
        (["python", "-m", "train"], 2, [sys.executable, "-m", "dovetail.launch", "--slots", "2", "-m", "train"]),
        (["python", "-W", "error", "a.py"], 2,
         [sys.executable, "-W", "error", "-m", "dovetail.launch", "--slots", "2", "a.py"]),
        (["python", "-m", "dovetail.launch", "a.py"], 2, [sys.executable, "-m", "dovetail.launch", "a.py"]),
        (["python", "-c", "pass"], 2, [sys.executable, "-c", "pass"]),
        (["bash", "train.sh"], 2, ["bash", "train.sh"]),
        (["model_def:A"], 1, [sys.executable, "-m", "dovetail.launch", "--slots", "1", "model_def:A"]),
        (["model_def:A"], 2, [sys.executable, "-m", "dovetail.launch", "--slots", "2", "model_def:A"]),
        (["python3", "-u", "-m", "determined.launch.torch_distributed", "a.py", "x"], 2,
         [sys.executable, "-u", "-m", "dovetail.launch", "--slots", "2", "a.py", "x"]),
        (["python3", "-m", "determined.launch.torch_distributed", "-m", "a"], 1,
         [sys.executable, "-m", "dovetail.launch", "--slots", "1", "--group", "-m", "a"]),
    ],
)  # fmt: skip
def test_the_command_of_a_trial_is_built_from_its_entrypoint(
    entrypoint: list[str], slots: int, expected: list[str]
) -> None:
    assert command_of(entrypoint, slots) == expected


@pytest.mark.slow
def test_a_trial_with_two_slots_runs_in_two_processes(lab: Any) -> None:
    script = "(folder / ('rank_' + os.environ['RANK'])).touch(); report(1, 0.5)"
    done = lab.run(script, resources={"slots_per_trial": 2})
    assert done.state == "COMPLETED", (done.trials[0].directory / "log.txt").read_text()
    assert sorted(path.name for path in done.trials[0].directory.glob("rank_*")) == ["rank_0", "rank_1"]


def test_an_invalid_experiment_raises_a_one_sentence_error(lab: Any) -> None:
    command = [sys.executable, "-m", "dovetail.search", str(lab.store.home), "7"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, "dovetail: there is no experiment 7: there is none\n")
    assert LocalBackend(slots=3).capacity(2) == 1


def test_cluster_storage_is_rejected_on_a_single_machine() -> None:
    config = read_experiment(
        {
            "entrypoint": "true",
            "searcher": {"name": "single", "metric": "loss"},
            "checkpoint_storage": "memory://runs",
        }
    )
    with pytest.raises(ConfigError, match="'memory://runs' is a URL, to which only a cluster copies"):
        backend_for(config, 1)
