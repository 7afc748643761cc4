from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from rich.console import Console

from dovetail.cli.follow import changes, print_log, summary, trials_view
from dovetail.search.records import ExperimentRecord, TrialRecord

START = datetime(2026, 1, 2, tzinfo=timezone.utc)


def trial(number: int, **changed: object) -> TrialRecord:
    record = TrialRecord(10 + number, number, 1, "COMPLETED", {"lr": 0.1 * number}, Path("."), best=1.0 + number)
    return replace(record, **changed)  # type: ignore[arg-type]


def experiment(*trials: TrialRecord) -> ExperimentRecord:
    config = {"hyperparameters": {"lr": {"type": "double"}}, "searcher": {"metric": "loss"}}
    return ExperimentRecord(1, "demo", "ACTIVE", config, Path("."), START, START, trials=trials)


def shown(record: ExperimentRecord, num_rows: int | None, width: int = 100) -> str:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(trials_view(record, num_rows, width))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_a_short_table_shows_the_best_the_running_and_the_newest_trials() -> None:
    trials = [trial(number) for number in range(10)]
    trials[4] = replace(trials[4], state="RUNNING", best=None)
    lines = shown(experiment(*trials), 4).splitlines()
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == ["trial", "10", "14", "18", "19"]
    assert lines[-1].strip() == "and 6 more"


def test_the_restarts_column_is_shown_if_a_trial_restarted() -> None:
    assert "restarts" not in shown(experiment(trial(0)), None)
    assert "restarts" in shown(experiment(trial(0, restarts=1)), None)


def test_the_progress_column_is_shown_while_reporting_trials_run() -> None:
    assert "progress" not in shown(experiment(trial(0, progress=1.0)), None)
    text = shown(experiment(trial(0, progress=1.0), trial(1, state="RUNNING", progress=0.254)), None)
    assert "│ progress │" in text
    assert " 25% │" in text
    assert "100%" not in text


def test_the_status_column_is_shown_while_trials_that_set_it_run() -> None:
    assert "status" not in shown(experiment(trial(0, status="done")), None)
    text = shown(experiment(trial(0, status="done"), trial(1, state="RUNNING", status="loading " + "x" * 90)), None)
    assert "│ status " in text
    assert "│ loading xx" in text
    assert "done" not in text
    # The other columns keep their place.
    assert max(map(len, text.splitlines())) <= 100


def test_an_experiment_without_trials_is_one_line() -> None:
    assert (
        shown(experiment(), None).rstrip() == summary(experiment()) == "experiment 1 (demo) ACTIVE · 0 trials · 0:00:00"
    )


def test_a_long_log_is_printed_completely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Each sign is three bytes, so that a part of any size but a multiple of three ends inside of one.
    text = "━" * 50_000 + "\n"
    (tmp_path / "log.txt").write_text(text, encoding="utf-8")
    print_log(tmp_path / "log.txt", "trial 1")
    assert capsys.readouterr().out == text


def test_a_partially_written_character_is_printed_when_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, sign = tmp_path / "log.txt", "━".encode()
    log.write_bytes(sign[:1])
    looks = iter([False, True])

    def is_over() -> bool:
        over = next(looks)
        if over:
            log.write_bytes(sign)
        return over

    print_log(log, "trial 1", is_over)
    assert capsys.readouterr().out == "━"


def test_each_change_is_printed_once() -> None:
    before = experiment(trial(0, state="RUNNING", values={10: 2.0}))
    after = experiment(trial(0, state="RUNNING", values={10: 2.0, 20: 1.0}, restarts=1, reason="it fell"))
    assert changes(before, after) == [
        "trial 10 loss 1 after 20 batches",
        "trial 10 restarts: it fell",
    ]
    assert changes(after, after) == []


@pytest.mark.parametrize("width", [60, 80, 120, 140])
def test_a_narrow_terminal_truncates_no_number_and_no_state(width: int) -> None:
    hparams = {"lr": 0.000123456, "weight_decay": 0.01, "depth": 12}
    record = experiment(
        trial(0, hparams=hparams, best=2.3467e-10, latest=7.038e-5, steps=12345, restarts=1),
        trial(1, hparams=hparams, state="RUNNING", status="loading " + "x" * 90, progress=0.25, steps=12345),
    )
    screen = Console(file=io.StringIO(), width=width)
    screen.print(trials_view(record, 4, width))
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for cell in ("COMPLETED", "RUNNING", "2.347e-10", " 10 ", "0.0001235"):
        assert cell in text
    assert ("7.038e-05" in text, "status" in text) == (width >= 120, width >= 120)


def test_hyperparameters_have_a_column_each_where_they_fit() -> None:
    kinds = {
        "learning_rate": "log",
        "weight_decay": "double",
        "model": {"width": {"type": "int"}},
        "act": "categorical",
    }
    declared = {name: kind if isinstance(kind, dict) else {"type": kind} for name, kind in kinds.items()}
    config = {"hyperparameters": declared, "searcher": {"metric": "loss"}}
    hparams = {"learning_rate": 0.001067, "weight_decay": 0.06924, "model": {"width": 108}, "act": "relu"}
    record = replace(
        experiment(trial(0, hparams=hparams, latest=1.5), trial(1, hparams={"act": "tanh"})), config=config
    )
    lines = shown(record, None).splitlines()
    assert lines[2] == "│ trial │ state     │ learning_rate │ weight_decay │ width │ act  │ batches │ latest │ best │"
    assert lines[4] == "│    10 │ COMPLETED │      0.001067 │      0.06924 │   108 │ relu │       0 │    1.5 │    1 │"
    assert lines[5] == "│    11 │ COMPLETED │             – │            – │     – │ tanh │       0 │      – │    2 │"
    # A narrow terminal has them as one text, which is wrapped.
    assert "│ hyperparameters " in shown(record, None, 70)
