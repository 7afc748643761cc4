from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.callbacks import CSVLogger, JSONLLogger, LambdaCallback
from dovetail.trainers.reuse import reset
from dovetail.units import Batches, Epochs


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [json.loads(line) for line in path.read_text().splitlines()]


KINDS = pytest.mark.parametrize(("kind", "name"), [(CSVLogger, "log.csv"), (JSONLLogger, "log.jsonl")])


@KINDS
def test_every_epoch_has_one_row_with_the_metrics_of_the_history(
    make: Callable[..., Any], data: Any, tmp_path: Path, kind: Any, name: str
) -> None:
    path = tmp_path / "new" / name
    history = make(kind(path)).fit(None, data, max_length=Epochs(3))
    rows = read(path)
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    assert [int(row["updates"]) for row in rows] == [5, 10, 15]
    for metric in ("train_loss", "valid_loss", "valid_accuracy"):
        assert [float(row[metric]) for row in rows] == history.get_metric_values(metric)


@KINDS
def test_validations_inside_an_epoch_have_separate_rows(
    scripted: Callable[..., Any], tmp_path: Path, kind: Any, name: str
) -> None:
    trainer = scripted(kind(tmp_path / name)).script(5.0, 4.0, 3.0, 2.0, 1.0)
    trainer.fit(max_length=Epochs(2), validation_period=Batches(2))
    rows = [
        (int(row["batches"]), float(row.get("valid_loss", 0)), "train_loss" in row) for row in read(tmp_path / name)
    ]
    assert rows == [
        (2, 5.0, False),
        (4, 4.0, False),
        (5, 0.0, True),
        (6, 3.0, False),
        (8, 2.0, False),
        (10, 1.0, True),
    ]


@KINDS
def test_a_validation_at_the_last_batch_shares_the_row_of_its_epoch(
    scripted: Callable[..., Any], tmp_path: Path, kind: Any, name: str
) -> None:
    trainer = scripted(kind(tmp_path / name)).script(4.0, 3.0)
    trainer.fit(max_length=Epochs(2), validation_period=Batches(5))
    rows = read(tmp_path / name)
    assert [(int(row["epoch"]), float(row["valid_loss"])) for row in rows] == [(1, 4.0), (2, 3.0)]
    assert all("train_loss" in row for row in rows)


@KINDS
def test_a_validation_after_the_last_epoch_is_written(
    scripted: Callable[..., Any], tmp_path: Path, kind: Any, name: str
) -> None:
    trainer = scripted(kind(tmp_path / name)).script(4.0, 3.0)
    trainer.fit(max_length=Epochs(3), validation_period=Epochs(2))
    assert [row.get("valid_loss") and float(row["valid_loss"]) for row in read(tmp_path / name)] == [None, 4.0, 3.0]


@KINDS
def test_new_metrics_become_new_columns(scripted: Callable[..., Any], tmp_path: Path, kind: Any, name: str) -> None:
    trainer = scripted(kind(tmp_path / name)).script({"loss": 1.0}, {"loss": 0.5, "f1": 0.25})
    trainer.fit(max_length=Epochs(2))
    first, second = read(tmp_path / name)
    assert "valid_f1" not in first
    assert float(second["valid_f1"]) == 0.25
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@KINDS
@pytest.mark.parametrize("cut", [1, 2])
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(
    scripted: Callable[..., Any], tmp_path: Path, kind: Any, name: str, cut: Any
) -> None:
    values = ({"loss": 4.0}, {"loss": 3.0}, {"loss": 2.0, "f1": 0.5}, {"loss": math.nan})
    scripted(kind(tmp_path / f"straight-{name}")).script(*values).fit(max_length=Epochs(4))
    states = []
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    # This run continues after the checkpoint, and its further rows are lost.
    scripted(kind(tmp_path / name), keep).script(*values).fit(max_length=Epochs(3))
    resumed = scripted(kind(tmp_path / name)).script(*values[cut:])
    resumed.load_state_dict(states[cut - 1])
    resumed.fit(max_length=Epochs(4))
    assert (tmp_path / name).read_bytes() == (tmp_path / f"straight-{name}").read_bytes()


@KINDS
def test_a_new_run_starts_a_new_file(make: Callable[..., Any], tmp_path: Path, kind: Any, name: str) -> None:
    for _ in range(2):
        make(kind(tmp_path / name)).fit(max_length=Epochs(2))
    assert len(read(tmp_path / name)) == 2


@KINDS
def test_a_new_run_of_the_same_trainer_starts_a_new_file(
    make: Callable[..., Any], tmp_path: Path, kind: Any, name: str
) -> None:
    trainer = make(kind(tmp_path / name))
    trainer.fit(max_length=Epochs(2))
    reset(trainer)
    trainer.fit(max_length=Epochs(1))
    assert [int(row["epoch"]) for row in read(tmp_path / name)] == [1]


@KINDS
def test_a_further_fit_appends_to_the_file(make: Callable[..., Any], tmp_path: Path, kind: Any, name: str) -> None:
    trainer = make(kind(tmp_path / name))
    trainer.fit(max_length=Epochs(1))
    trainer.fit(max_length=Epochs(3))
    assert [int(row["epoch"]) for row in read(tmp_path / name)] == [1, 2, 3]


@KINDS
def test_missing_rows_are_reported_on_resume(tmp_path: Path, kind: Any, name: str) -> None:
    with pytest.warns(UserWarning, match="has 0 rows, the checkpoint has 3: the others are lost"):
        kind(tmp_path / name).load_state_dict({"rows": 3})


def test_json_has_strings_for_values_that_are_not_finite(scripted: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    scripted(JSONLLogger(path)).script(math.nan, -math.inf).fit(max_length=Epochs(2))

    def refuse(constant: Any) -> None:
        raise AssertionError(constant)

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [row["valid_loss"] for row in rows] == ["NaN", "-Infinity"]


@KINDS
@pytest.mark.parametrize("damage", [b"\xff\xfe\n", b'[[["\0\n', b"batches\nmany\n"])
def test_a_damaged_file_is_moved_aside_and_does_not_end_a_resumed_run(
    make: Callable[..., Any], data: Any, tmp_path: Path, kind: Any, name: str, damage: Any
) -> None:
    path, checkpoint = tmp_path / name, tmp_path / "ck"
    trainer = make(kind(path))
    trainer.fit(None, data, max_length=Epochs(2))
    trainer.save_checkpoint(checkpoint)
    whole = path.read_bytes()
    path.write_bytes(damage + whole)
    with pytest.warns(UserWarning, match=rf"{name} has 0 rows.*the damaged file is kept as {name}\.damaged-"):
        make(kind(path)).fit(None, data, max_length=Epochs(3), resume=checkpoint)
    assert [int(row["epoch"]) for row in read(path)] == [3]
    (aside,) = tmp_path.glob(f"{name}.damaged-*")
    assert aside.read_bytes() == damage + whole
