"""`dovetail trial …`."""

from __future__ import annotations

import json
from typing import Any

from dovetail.search.records import TrialRecord
from dovetail.search.runner import Runner
from dovetail.search.schema import read_experiment
from dovetail.search.store import Store


def test_describe_shows_a_trial(run: Any, finished: Any) -> None:
    code, out, _ = run("trial", "describe", 4, "--home", finished.home)
    assert code == 0
    facts = dict(line.split("  ", 1) for line in out.splitlines())
    assert {name: value.strip() for name, value in facts.items()}.items() >= {
        "trial": "4 of experiment 1",
        "state": "COMPLETED",
        "hyperparameters": "learning_rate 0.5, width 4, batch_size 8",
        "best validation_loss": "1 after 20 batches",
        "batches": "20",
    }.items()


def test_describe_prints_json_with_every_value(run: Any, finished: Any) -> None:
    _, out, _ = run("trial", "describe", 4, "--home", finished.home, "--json")
    found = json.loads(out)
    assert (found["metric"], found["best"], found["best_at"]) == ("validation_loss", 1.0, 20)
    assert found["values"] == {"10": 2.0, "20": 1.0}


def test_describe_shows_the_last_status_of_a_trial(run: Any, project: Any) -> None:
    lines = '    file.write(\'{"status": "loading"}\\n{"status": "saving"}\\n\')\n'
    (project.code / "train.py").write_text((project.code / "train.py").read_text() + lines)
    run("e", "create", project.config, project.code, "--home", project.home, "--set", "hyperparameters.width.vals=[2]")
    _, out, _ = run("trial", "describe", 1, "--home", project.home)
    assert dict(line.split(maxsplit=1) for line in out.splitlines())["status"] == "saving"
    assert json.loads(run("trial", "describe", 1, "--home", project.home, "--json")[1])["status"] == "saving"
    assert json.loads(run("e", "describe", 1, "--home", project.home, "--json")[1])["trials"][0]["status"] == "saving"


def test_an_unknown_trial_prints_one_sentence(run: Any, finished: Any) -> None:
    code, out, err = run("trial", "describe", 99, "--home", finished.home)
    assert (code, out) == (1, "")
    assert err == "dovetail: there is no trial 99: there are trials 1 to 4\n"


def test_logs_prints_the_output_of_the_trial(run: Any, finished: Any) -> None:
    assert run("trial", "logs", 2, "--home", finished.home) == (0, "trial 2 \n", "")
    assert run("trial", "logs", 2, "--follow", "--home", finished.home) == (0, "trial 2 \n", "")


def test_metrics_prints_a_table_of_the_reports(run: Any, finished: Any) -> None:
    code, out, _ = run("trial", "metrics", 4, "--home", finished.home)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert code == 0
    assert rows == [
        ["group", "batches", "loss", "epochs", "validation_loss"],
        ["training", "10", "2", "1", "–"],
        ["validation", "10", "–", "1", "2"],
        ["training", "20", "1", "2", "–"],
        ["validation", "20", "–", "2", "1"],
    ]


def test_a_line_that_is_not_a_report_is_named(run: Any, project: Any) -> None:
    (project.code / "train.py").write_text((project.code / "train.py").read_text() + '    file.write("[1]\\n")\n')
    run("e", "create", project.config, project.code, "--home", project.home, "--set", "hyperparameters.width.vals=[2]")
    code, out, err = run("trial", "metrics", 1, "--home", project.home)
    assert (code, err) == (0, "metrics.jsonl, line 5: expected an object, got list; the line is ignored\n")
    assert "validation_loss" in out
    assert "metrics.jsonl, line 5: expected an object" in run("trial", "logs", 1, "--home", project.home)[1]


def test_metrics_prints_one_group_as_json(run: Any, finished: Any) -> None:
    _, out, _ = run("trial", "metrics", 4, "--group", "validation", "--home", finished.home, "--json")
    assert json.loads(out) == [
        {"group": "validation", "batches": 10, "metrics": {"validation_loss": 2.0, "epochs": 1}},
        {"group": "validation", "batches": 20, "metrics": {"validation_loss": 1.0, "epochs": 2}},
    ]


def test_an_unknown_metric_group_is_a_usage_error(run: Any, finished: Any) -> None:
    code, _, err = run("trial", "metrics", 4, "--group", "validaton", "--home", finished.home)
    assert code == 1
    assert err == "dovetail: unknown group 'validaton': did you mean 'validation'? (known: training, validation)\n"


def _run_one(project: Any) -> TrialRecord:
    store = Store.open(project.home)
    config = read_experiment(project.config, ["hyperparameters.width=2", "hyperparameters.learning_rate=1"])
    return Runner(store, store.create_experiment(config, "", project.code).id).run().trials[0]


def test_the_later_of_two_reports_for_one_batch_is_printed(run: Any, project: Any) -> None:
    reported = [(20, "NaN"), (None, 7.0), ([20], 8.0), ("30", 9.0)]
    rows = [
        {"group": "validation", "steps_completed": steps, "metrics": {"validation_loss": loss}}
        for steps, loss in reported
    ]
    with open(_run_one(project).directory / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    _, out, _ = run("trial", "metrics", 1, "--group", "validation", "--home", project.home, "--json")
    assert [row["metrics"]["validation_loss"] for row in json.loads(out)] == [2.0, "NaN"]
