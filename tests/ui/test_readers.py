"""Readers of growing files."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.history import History
from dovetail.ui.columns import Columns, rows_of
from dovetail.ui.readers import HistoryReader, LogTail, ReportsReader

HEADER = b'{"dovetail_history": 1}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ck_history.jsonl"


def recorded(path: Path, epochs: int) -> History:
    history = History()
    history.attach(path)
    for epoch in range(1, epochs + 1):
        history.extend_losses([1.0 / epoch, 2.0 / epoch])
        history.record("train", {"loss": 1.5 / epoch, "lr": 0.1}, epoch=epoch, batches=2 * epoch, updates=epoch)
        history.record("valid", {"loss": 1.0 / epoch}, epoch=epoch, batches=2 * epoch, updates=epoch)
    return history


def same_as(reader: HistoryReader, history: History) -> bool:
    rows = [{key: value for key, value in row.items() if value == value} for row in history.rows]
    return (list(rows_of(reader.columns)), reader.columns.losses) == (rows, history.losses)


def test_a_file_read_at_every_byte_equals_the_whole_history(path: Path, tmp_path: Path) -> None:
    history = recorded(path, 4)
    content = path.read_bytes()
    growing = tmp_path / "growing_history.jsonl"
    reader = HistoryReader(growing)
    with growing.open("wb", buffering=0) as file:
        for start in range(0, len(content), 7):
            file.write(content[start : start + 7])
            reader.update()
    assert same_as(reader, history)
    assert reader.update() is False


def test_only_new_bytes_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = recorded(path, 200)
    reader = HistoryReader(path)
    reader.update()
    parsed: list[int] = []
    parse = reader._parse

    def counting(text: bytes) -> Any:
        parsed.append(len(text))
        return parse(text)

    monkeypatch.setattr(reader, "_parse", counting)
    history.record("valid", {"loss": 0.5}, epoch=201)
    assert reader.update() is True
    assert same_as(reader, history)
    assert sum(parsed) < 60


def test_a_resumed_run_that_cut_its_file_is_read_again(path: Path) -> None:
    reader = HistoryReader(path)
    recorded(path, 5)
    reader.update()
    history = recorded(path, 3)
    assert reader.update() is True
    assert same_as(reader, history)


def test_a_file_cut_and_written_beyond_its_old_end_is_read_again(path: Path) -> None:
    path.write_bytes(HEADER + b'{"stage": "train", "epoch": 1, "loss": 1.0}\n')
    reader = HistoryReader(path)
    reader.update()
    before = os.stat(path).st_ino
    with path.open("rb+") as file:
        file.write(
            HEADER + b'{"stage": "train", "epoch": 9, "loss": 2.0}\n{"stage": "train", "epoch": 10, "loss": 3.0}\n'
        )
    assert os.stat(path).st_ino == before
    assert reader.update() is True
    assert [row["epoch"] for row in rows_of(reader.columns)] == [9, 10]


def test_a_removed_file_keeps_its_curves_and_reports_a_problem(path: Path) -> None:
    history = recorded(path, 2)
    reader = HistoryReader(path)
    reader.update()
    path.unlink()
    assert (reader.update(), reader.problem) == (True, "No such file or directory")
    assert same_as(reader, history)


@pytest.mark.parametrize("content", [b"not json\n", b"[]\n", b'{"dovetail_history": 2}\n', b'{"a": 1}\n'])
def test_another_file_is_a_problem_and_not_an_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    reader = HistoryReader(path)
    reader.update()
    assert reader.problem == "not a Dovetail history of format 1"


def test_damaged_lines_are_counted_and_left_out(path: Path) -> None:
    good = b'{"stage": "valid", "epoch": 1, "loss": 0.5}\n'
    path.write_bytes(HEADER + good + b'\xff\n{"loss": 1}\n[]\n{"stage": "batches"}\n' + b"[" * 5000 + b"\n" + good)
    reader = HistoryReader(path)
    reader.update()
    assert (reader.columns.num_rows, reader.num_rejected, reader.problem) == (2, 5, None)


def test_values_that_json_lacks_are_read(path: Path) -> None:
    history = History()
    history.attach(path)
    history.extend_losses([1.0, float("nan"), float("inf"), 2.0])
    history.record("valid", {"loss": float("inf")}, epoch=1)
    reader = HistoryReader(path)
    reader.update()
    assert np.array_equal(reader.columns.losses, array("d", history.losses), equal_nan=True)
    assert reader.columns.last("valid_loss") == float("inf")


def test_a_fifo_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    reader = HistoryReader(path)
    assert (reader.update(), reader.problem) == (False, "not a regular file")


def test_batch_losses_have_a_position_in_every_unit(path: Path) -> None:
    recorded(path, 2)
    reader = HistoryReader(path)
    reader.update()
    times = {0: 100.0, 1: 110.0, 2: 111.0, 3: 120.0, 4: 121.0}
    found = {x: reader.columns.series("batch_loss", x, times)[0].tolist() for x in ("batches", "epoch", "updates")}
    assert found == {"batches": [1, 2, 3, 4], "epoch": [0.5, 1, 1.5, 2], "updates": [0.5, 1, 1.5, 2]}
    assert reader.columns.series("train_loss", "time", times)[0].tolist() == [10, 20]
    assert reader.columns.series("batch_loss", "time", times)[0].tolist()[1:] == [10, 15, 20]


def test_a_metric_that_appears_later_has_its_own_rows(path: Path) -> None:
    path.write_bytes(
        HEADER
        + b'{"stage": "train", "epoch": 1, "loss": 1.0}\n{"stage": "train", "epoch": 2, "acc": 0.5}\n'
        + b'{"stage": "train", "epoch": 3, "loss": 3.0}\n{"stage": "custom", "acc": 7.0}\n'
    )
    reader = HistoryReader(path)
    reader.update()
    assert reader.columns.metrics() == ["train_loss", "train_acc", "acc"]
    assert [each.tolist() for each in reader.columns.series("train_loss", "epoch")] == [[1, 3], [1.0, 3.0]]
    assert [each.tolist() for each in reader.columns.series("train_acc", "epoch")] == [[2], [0.5]]


def report(group: str, steps: int, **metrics: float) -> str:
    return json.dumps({"group": group, "steps_completed": steps, "metrics": metrics, "time": 10.0 + steps}) + "\n"


def test_reports_of_a_trial_become_stages_and_repeats_replace(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(report("training", 10, loss=2.0) + report("validation", 10, loss=1.0) + '{"progress": 0.5}\n')
    reader = ReportsReader(path)
    assert reader.update() is True
    with path.open("a") as file:
        file.write(report("validation", 20, loss=0.5) + report("validation", 10, loss=0.9))
    reader.update()
    assert [each.tolist() for each in reader.columns.series("valid_loss", "batches")] == [[10, 20], [0.9, 0.5]]
    assert reader.columns.series("valid_loss", "time")[0].tolist() == [0, 10]
    path.write_text(report("validation", 5, loss=0.1))
    reader.update()
    assert reader.columns.values("valid_loss").tolist() == [0.1]


def test_a_metric_with_the_name_of_its_group_has_one_stage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        report("validation", 0, validation_loss=2.0) + report("validation", 1, validation_loss=1.0, loss=3.0)
    )
    reader = ReportsReader(path)
    reader.update()
    # If both names exist, both are kept.
    assert reader.columns.values("valid_loss").tolist() == [2.0, 3.0]
    assert reader.columns.values("valid_validation_loss").tolist() == [1.0]


def test_the_tail_of_a_log_has_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    tail = LogTail(path, num_bytes=20)
    assert tail.update() is False
    path.write_bytes(b"a first line\nsecond \xff line\nthird\n")
    assert (tail.update(), tail.text) == (True, "third\n")
    assert tail.update() is False


@pytest.mark.parametrize(
    "rows",
    [
        [{"epoch": each, "loss": 0.5 * each} for each in range(4)],
        [{"epoch": 1, "loss": 1}, {"epoch": 2}, {"loss": 0.25, "lr": 0.1}],
        [{"epoch": 1, "loss": "NaN"}, {"epoch": 2, "loss": True}],
        [{"epoch": 1, "loss": 10**400}, {"epoch": 2, "loss": None}],
        [{}, {}],
    ],
)
def test_many_rows_at_once_equal_one_row_at_a_time(rows: list[dict[str, Any]]) -> None:
    staged = [(stage, row) for row in rows for stage in ("train", "valid")]
    single, several, mixed = Columns(), Columns(), Columns()
    for stage, row in staged:
        single.add(stage, row)
    several.extend(staged)
    mixed.add(*staged[0])
    mixed.extend(staged[1:])
    assert repr(several) == repr(mixed) == repr(single)
