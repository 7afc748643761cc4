"""`dovetail experiment …`."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import load_config, parse_config
from dovetail.search.runner import start_detached
from dovetail.search.schema import read_experiment
from dovetail.search.searchers import Composed, GridSampler, NeverStop, SearcherKind, searchers
from dovetail.search.store import Store


def wait_until(is_so: Callable[[], Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def start(*arguments: object, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, "-m", "dovetail", *map(str, arguments)], **options)


def create_detached(project: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Not in this process, which would have a child that it never waits for.
    command = ["e", "create", project.config, project.code, "--home", project.home, "--detach", *arguments]
    words = [sys.executable, "-m", "dovetail", *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=True)


# ------------------------------------------------------------------ create


def test_create_runs_the_experiment_and_prints_events(run: Any, project: Any) -> None:
    code, out, err = run("experiment", "create", project.config, project.code, "--home", project.home)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "created experiment 1"
    assert "trial 1 RUNNING: learning_rate 0.25, width 2, batch_size 8" in lines
    assert "trial 4 validation_loss 1 after 20 batches" in lines
    assert {f"trial {number} COMPLETED" for number in range(1, 5)} <= set(lines)
    summary = "experiment 1 (demo) COMPLETED · 4 trials (4 completed) · best validation_loss 0.25 (trial 1)"
    assert lines[-1].startswith(summary)


def test_every_event_is_printed_once(run: Any, project: Any) -> None:
    _, out, _ = run("experiment", "create", project.config, project.code, "--home", project.home)
    lines = out.splitlines()
    assert len(set(lines)) == len(lines)


def test_set_changes_the_configuration(run: Any, project: Any) -> None:
    settings = ["--set", "hyperparameters.width.vals=[4]", "--set", "name=other"]
    run("experiment", "create", project.config, project.code, "--home", project.home, *settings)
    record = Store.open(project.home).experiment(1)
    assert record.name == "other"
    assert [trial.hparams["width"] for trial in record.trials] == [4, 4]


def test_the_short_command_alias_works(run: Any, finished: Any) -> None:
    assert run("e", "list", "--home", finished.home) == run("experiment", "list", "--home", finished.home)


def test_every_mistake_in_a_file_is_named_and_nothing_is_created(run: Any, project: Any) -> None:
    project.config.write_text(
        project.config.read_text().replace("metric:", "metrik:").replace("name: grid", "name: gird")
    )
    code, out, err = run("experiment", "create", project.config, project.code, "--home", project.home)
    assert (code, out) == (1, "")
    assert err.startswith("dovetail: ")
    assert len(err.splitlines()) >= 2
    assert "'gird'" in err
    assert "metrik" in err
    assert not project.home.exists()


@pytest.mark.filterwarnings("default:.*keys without an effect here")
@pytest.mark.parametrize("options", [[], ["--test"]])
def test_ignored_keys_are_reported_in_one_sentence(run: Any, project: Any, options: list[str]) -> None:
    project.config.write_text(project.config.read_text() + "scheduling_unit: 100\n")
    sentence = f"dovetail: warning: {project.config}: keys without an effect here are ignored: scheduling_unit\n"
    code, _, err = run("e", "create", project.config, project.code, "--home", project.home, *options)
    assert (code, err) == (0, sentence)


def test_an_unknown_trial_class_is_named_with_its_place(run: Any, project: Any) -> None:
    (project.code / "model_def.py").write_text("class DemoTrial: pass\n")
    text = project.config.read_text().replace("python3 train.py", "model_def:DemoTrail")
    project.config.write_text(text.replace("name: grid", "name: grid, max_length: {epochs: 1}"))
    code, out, err = run("experiment", "create", project.config, project.code, "--home", project.home)
    assert (code, out) == (1, "")
    assert err == (
        f"dovetail: {project.config}:4:1: entrypoint: unknown class of an entrypoint in model_def.py 'DemoTrail': "
        "did you mean 'DemoTrial'? (known: DemoTrial)\n"
    )
    assert not project.home.exists()


def test_a_missing_file_is_a_usage_error(run: Any, tmp_path: Path) -> None:
    code, _, err = run("experiment", "create", tmp_path / "none.yaml")
    assert code == 2
    assert "does not exist" in err


def test_an_unsuccessful_experiment_exits_with_3_and_names_the_logs(run: Any, project: Any) -> None:
    setting = "data.fails=[2, 4]"
    code, _, err = run("e", "create", project.config, project.code, "--home", project.home, "--set", setting)
    assert code == 3
    assert err.splitlines()[0] == "trial 1 failed: attempt 0 ended with exit code 1: this width is too much"
    assert err.splitlines()[1].startswith("see 'dovetail trial logs 1' for details: ")


def test_the_test_option_runs_only_the_first_trial(run: Any, project: Any) -> None:
    code, _, _ = run("experiment", "create", project.config, project.code, "--home", project.home, "--test")
    assert code == 0
    (trial,) = Store.open(project.home).experiment(1).trials
    assert trial.hparams == {"learning_rate": 0.25, "width": 2, "batch_size": 8}
    assert (trial.directory / "log.txt").read_text() == "trial 1 test\n"


def test_the_test_option_and_best_keep_the_length_of_the_searcher(run: Any, project: Any) -> None:
    halving = "searcher: {name: async_halving, metric: validation_loss, num_rungs: 1, max_trials: 1, "
    text = project.config.read_text().replace("searcher: {name: grid, metric: validation_loss", halving)
    project.config.write_text(text.replace("max_trials: 1, }", "max_trials: 1, max_time: 2, time_metric: epochs}"))
    home = ("--home", project.home)
    assert run("experiment", "create", project.config, project.code, *home, "--test")[0] == 0
    single = {"name": "single", "metric": "validation_loss", "max_length": {"epochs": 2}}
    assert Store.open(project.home).experiment(1).config["searcher"] == single
    assert run("experiment", "create", project.config, project.code, *home)[0] == 0
    assert parse_config(run("experiment", "best", 2, "--yaml", *home)[1])["searcher"] == single


@pytest.mark.slow
def test_a_detached_experiment_continues_and_its_logs_can_be_followed(project: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    assert create_detached(project, "--set", f"data.waits={gate}").stdout.splitlines()[0] == "created experiment 1"
    with start("e", "logs", 1, "--follow", "--home", project.home, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert "runs experiment 1" in following.stdout.readline()
        gate.touch()
        assert following.stdout.read().splitlines()[-1].endswith("experiment COMPLETED")
    assert following.returncode == 0
    assert [trial.state for trial in Store.open(project.home).experiment(1).trials] == ["COMPLETED"] * 4


def test_on_a_terminal_a_live_table_is_shown(project: Any) -> None:
    ours, theirs = pty.openpty()
    arguments = ["e", "create", project.config, project.code, "--home", project.home]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    shown = b""
    with start(*arguments, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        try:
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
        except OSError:
            # The error of a terminal whose last program has exited.
            pass
    os.close(ours)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "│ trial │ state     │ learning_rate │ width │" in text
    assert text.count("experiment 1 (demo)") > 1
    assert "experiment 1 (demo) COMPLETED" in text


# ------------------------------------------------------------------ looking


def test_list_shows_every_experiment(run: Any, finished: Any) -> None:
    code, out, _ = run("experiment", "list", "--home", finished.home)
    assert code == 0
    assert re.search(r"│ +1 │ demo │ COMPLETED │ +4 │ +0.25 │", out)


def test_json_has_stable_keys_and_iso_times(run: Any, finished: Any) -> None:
    _, out, _ = run("experiment", "list", "--home", finished.home, "--json")
    (found,) = json.loads(out)
    assert list(found) == [
        *("id", "name", "state", "is_running", "reason", "searcher", "metric", "is_first_metric"),
        *("smaller_is_better", "num_trials", "best_trial_id", "best"),
        *("created", "ended", "directory", "warnings"),
    ]
    assert datetime.fromisoformat(found["created"]).utcoffset() is not None
    assert (found["num_trials"], found["best"], found["best_trial_id"]) == (4, 0.25, 1)


def test_describe_has_configuration_and_trials_in_json(run: Any, finished: Any) -> None:
    _, out, _ = run("experiment", "describe", 1, "--home", finished.home, "--json")
    found = json.loads(out)
    assert found["config"]["searcher"]["name"] == "grid"
    assert [trial["hparams"]["width"] for trial in found["trials"]] == [2, 4, 2, 4]
    assert list(found["trials"][0]) == [
        *("id", "experiment_id", "state", "reason", "hparams", "best", "best_at", "latest", "batches"),
        *("progress", "status", "restarts", "source", "started", "ended", "directory"),
    ]


def test_describe_prints_text_unchanged_with_the_searched_hyperparameters(run: Any, finished: Any) -> None:
    _, out, _ = run("experiment", "describe", 1, "--home", finished.home)
    assert "A [bold] search" in out
    assert "│ learning_rate │ width │" in out


@pytest.mark.parametrize(
    "words",
    [
        *(("experiment", verb) for verb in ("describe", "logs", "pause", "resume", "cancel", "kill", "best", "report")),
        ("experiment", "delete", "--yes"),
        *(("trial", verb) for verb in ("describe", "logs", "metrics")),
        ("job", "logs"),
    ],
)
def test_an_id_too_large_for_the_database_prints_one_sentence(run: Any, finished: Any, words: tuple[str, ...]) -> None:
    for number in ("99999999999999999999", str(2**31), "9" * 300):
        code, out, err = run(*words, number, "--home", finished.home)
        assert (code, out) == (1, "")
        assert err.startswith(f"dovetail: there is no {words[0]} {number}: ")
    code, _, err = run("experiment", "logs", 1, "--trial", "99999999999999999999", "--home", finished.home)
    assert (code, err) == (
        1,
        "dovetail: experiment 1 has no trial 99999999999999999999: there are trials 1 to 4\n",
    )


def test_names_and_reasons_are_printed_without_control_characters(run: Any, project: Any) -> None:
    name = "a\x1b[2J\x9b1m\u202eb\r"
    (project.code / "train.py").write_text("raise SystemExit('no \\x1b]0;title\\x07')")
    settings = ["--set", f"name={json.dumps(name)}", "--set", "hyperparameters.width.vals=[2]"]
    output = [run("e", "create", project.config, project.code, "--home", project.home, *settings)[1:]]
    looks: tuple[list[Any], ...] = (["list"], ["describe", 1], ["describe", 1, "--json"], ["delete", 1])
    output += [run("experiment", *words, "--home", project.home)[1:] for words in looks]
    output.append(run("trial", "describe", 1, "--home", project.home)[1:])
    text = "".join(part for pair in output for part in pair)
    assert "a\\x1b[2J\\x9b1m\\u202eb\\r" in text
    assert "no \\x1b]0;title\\x07" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    page = project.folder / "page.html"
    run("experiment", "report", 1, "--output", page, "--home", project.home)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page.read_text())


def test_a_search_that_cannot_stop_trials_warns_in_every_view(run: Any, project: Any) -> None:
    (project.code / "train.py").write_text((project.code / "train.py").read_text().replace('"epochs": epoch', ""))
    searcher = {"name": "async_halving", "metric": "validation_loss", "max_trials": 2, "num_rungs": 2}
    searcher["max_length"] = {"epochs": 16}
    settings = ["--set", f"searcher={json.dumps(searcher)}"]
    _, out, _ = run("e", "create", project.config, project.code, "--home", project.home, *settings)
    sentence = "warning: trials report 'validation_loss' without a number 'epochs', by which the searcher async_halving"
    assert out.count(sentence) == 1
    assert "(1 warning)" in run("e", "list", "--home", project.home)[1]
    described = re.sub(r"\s+", " ", run("e", "describe", 1, "--home", project.home)[1])
    assert sentence in described
    assert "COMPLETED (1 warning)" in described
    (warning,) = json.loads(run("e", "describe", 1, "--home", project.home, "--json")[1])["warnings"]
    assert f"warning: {warning}".startswith(sentence)
    code, out, _ = run("e", "best", 1, "--home", project.home)
    assert (code, "after 20 batches" in out) == (0, True)
    page = project.folder / "page.html"
    run("e", "report", 1, "--output", page, "--home", project.home)
    assert "without a number &#x27;epochs&#x27;" in page.read_text()


def test_a_script_that_reports_nothing_fails_with_a_remedy(run: Any, project: Any) -> None:
    (project.code / "train.py").write_text("print('trained')")
    code, out, err = run("e", "create", project.config, project.code, "--home", project.home)
    assert code == 3
    assert "experiment 1 (demo) ERROR: no trial has succeeded" in out
    assert "trial 1 failed: it read no hyperparameter, so the searcher's choice of learning_rate, width" in err
    assert "it never reported the searcher's metric 'validation_loss'" in err
    assert "report_validation_metrics(batches, {'validation_loss': value})" in err
    described = run("e", "describe", 1, "--home", project.home)[1]
    # All four trials have failed in the same way.
    assert described.count("trial 1 failed: it read no hyperparameter") == described.count("failed: ") == 1


def test_an_unknown_experiment_prints_the_known_ones(run: Any, finished: Any) -> None:
    code, out, err = run("experiment", "describe", 7, "--home", finished.home)
    assert (code, out, err) == (1, "", "dovetail: there is no experiment 7: there is experiment 1\n")


def test_read_only_commands_create_no_folder(run: Any, tmp_path: Path) -> None:
    home = tmp_path / "home"
    sentence = (
        f"there are no experiments in {home}: create one with 'dovetail experiment create', or give another --home\n"
    )
    assert run("experiment", "list", "--home", home) == (0, "", sentence)
    assert run("experiment", "list", "--home", home, "--json") == (0, "[]\n", "")
    assert run("experiment", "describe", 1, "--home", home) == (1, "", f"dovetail: {sentence}")
    assert not home.exists()


def test_the_home_may_come_from_the_environment(run: Any, finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(finished.home))
    assert run("experiment", "best", 1)[0] == 0


def test_logs_are_printed_for_the_runner_or_a_trial(run: Any, finished: Any) -> None:
    assert run("experiment", "logs", 1, "--home", finished.home)[1].endswith("experiment COMPLETED\n")
    assert run("experiment", "logs", 1, "--trial", 3, "--home", finished.home) == (0, "trial 3 \n", "")


def test_following_a_finished_log_ends(run: Any, finished: Any) -> None:
    assert run("experiment", "logs", 1, "--trial", 3, "-f", "--home", finished.home) == (0, "trial 3 \n", "")


def test_an_unknown_trial_of_an_experiment_is_a_usage_error(run: Any, finished: Any) -> None:
    code, _, err = run("experiment", "logs", 1, "--trial", 0, "--home", finished.home)
    assert (code, err) == (1, "dovetail: experiment 1 has no trial 0: there are trials 1 to 4\n")


def test_best_prints_the_trial_and_its_hyperparameters(run: Any, finished: Any) -> None:
    _, out, _ = run("experiment", "best", 1, "--home", finished.home)
    assert [line.split(maxsplit=1)[1] for line in out.splitlines()] == [
        "1",
        "0.25 after 20 batches",
        "learning_rate 0.25, width 2, batch_size 8",
        "none",
    ]


def test_best_as_yaml_is_a_configuration_that_runs_that_trial(run: Any, finished: Any, tmp_path: Path) -> None:
    _, out, _ = run("experiment", "best", 1, "--yaml", "--home", finished.home)
    (tmp_path / "best.yaml").write_text(out)
    config = read_experiment(tmp_path / "best.yaml")
    assert (config.searcher.name, config.searcher.metric) == ("single", "validation_loss")
    assert config.hyperparameters == {"learning_rate": 0.25, "width": 2, "batch_size": 8}
    assert load_config(tmp_path / "best.yaml")["entrypoint"] == "python3 train.py"


def test_every_view_states_that_the_metric_is_the_first_reported_one(run: Any, project: Any) -> None:
    project.config.write_text(project.config.read_text().replace(", metric: validation_loss", ""))
    label = "validation_loss (first reported, smaller is better)"
    home = ("--home", project.home)
    code, out, _ = run("experiment", "create", project.config, project.code, *home)
    assert code == 0
    assert f"· best {label} 0.25 (trial 1)" in out.splitlines()[-1]
    # Tables break long cells into lines.
    assert "reported" in run("experiment", "list", *home)[1]
    for words in (("experiment", "describe", 1), ("experiment", "best", 1), ("trial", "describe", 1)):
        assert label in " ".join(run(*words, *home)[1].split()), words
        found = json.loads(run(*words, "--json", *home)[1])
        assert (found["metric"], found["is_first_metric"]) == ("validation_loss", True)


def test_report_prints_the_files_it_writes(run: Any, finished: Any, tmp_path: Path) -> None:
    code, out, _ = run("experiment", "report", 1, "--home", finished.home, "-o", tmp_path / "page.html")
    assert code == 0
    assert {Path(line).name for line in out.splitlines()} == {path.name for path in tmp_path.iterdir()}
    assert "page.html" in out


# ------------------------------------------------------------------ pause, resume, cancel, delete


@pytest.mark.slow
def test_ctrl_c_pauses_and_resume_continues(project: Any, tmp_path: Path, run: Any) -> None:
    gate = tmp_path / "gate"
    arguments = ["e", "create", project.config, project.code, "--home", project.home, "--set", f"data.waits={gate}"]
    with start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "RUNNING" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        messages = process.stderr.read()
    assert process.returncode == 130
    assert messages.endswith("continue it with 'dovetail experiment resume 1'\n")
    assert Store.open(project.home).experiment(1).state == "PAUSED"
    gate.touch()
    code, out, _ = run("experiment", "resume", 1, "--home", project.home)
    assert code == 0
    # Earlier lines are not printed again, because this trial continues.
    assert out.splitlines()[0] == "trial 1 RUNNING"
    trials = Store.open(project.home).experiment(1).trials
    assert [trial.state for trial in trials] == ["COMPLETED"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("request_name", "state"), [("pause", "PAUSED"), ("cancel", "CANCELED"), ("kill", "CANCELED")])
def test_a_command_returns_after_its_request_is_done(run: Any, project: Any, request_name: str, state: str) -> None:
    store = Store.open(project.home)
    config = read_experiment(project.config, [f"data.waits={project.folder / 'never'}"])
    start_detached(store, store.create_experiment(config, "", project.code).id)
    wait_until(lambda: store.experiment(1).is_running and store.experiment(1).trials)
    assert run("e", request_name, 1, "--home", project.home) == (0, f"experiment 1 is {state}\n", "")
    assert not store.experiment(1).is_running


def test_a_finished_experiment_can_neither_be_paused_nor_resumed(run: Any, finished: Any) -> None:
    sentence = "dovetail: experiment 1 is COMPLETED already: it cannot pause\n"
    assert run("e", "pause", 1, "--home", finished.home) == (1, "", sentence)
    sentence = "dovetail: experiment 1 is COMPLETED: it cannot be resumed\n"
    assert run("e", "resume", 1, "--home", finished.home) == (1, "", sentence)


def test_delete_asks_for_confirmation(run: Any, finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    code, out, _ = run("e", "delete", 1, "--home", finished.home)
    assert code == 1
    assert out.startswith("Delete experiment 1 (demo), its 4 trials and all checkpoints? [y/N]")
    assert len(Store.open(finished.home).experiments()) == 1


def test_delete_removes_the_experiment(run: Any, project: Any) -> None:
    store = Store.open(project.home)
    record = store.create_experiment(read_experiment(project.config), project.config.read_text(), project.code)
    store.set_state(record.id, "CANCELED")
    assert run("e", "delete", 1, "--yes", "--home", project.home) == (0, "deleted experiment 1\n", "")
    assert store.experiments() == []
    assert not record.directory.exists()


def test_a_searcher_registered_in_this_process_is_known_to_the_command(run: Any, project: Any) -> None:
    kind = SearcherKind(lambda config, space, seed: Composed(GridSampler(space), NeverStop(), max_trials=1))
    searchers.register("first_point", kind)
    words = ["e", "create", project.config, project.code, "--home", project.home, "--set", "searcher.name=first_point"]
    code, out, _ = run(*words)
    assert code == 0
    assert "experiment 1 (demo) COMPLETED · 1 trial (1 completed)" in out


def test_without_optuna_the_test_option_prints_one_sentence(
    run: Any, project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    words = "dovetail: optuna is not installed: pip install 'dovetail[search]'\n"
    assert run("e", "create", project.config, project.code, "--test", "--home", project.home) == (1, "", words)


# ------------------------------------------------------------------ shells


def test_shell_completion_lists_experiments(finished: Any) -> None:
    words = f"dovetail experiment describe --home {finished.home} "
    environment = {**os.environ, "_DOVETAIL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "5"}
    code = "from dovetail.cli import app; app(prog_name='dovetail')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1"]
