"""Which checkpoints are kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from dovetail.checkpoint import (
    CheckpointInfo,
    TrialCheckpoint,
    experiment_retention,
    list_checkpoints,
    load,
    prune,
    retain,
    save,
)
from dovetail.checkpoint.files import Files
from dovetail.errors import ConfigError, UnknownNameError

_LOSSES = [0.9, 0.3, None, 0.5, 0.3, float("nan"), 0.7]


def _infos() -> list[CheckpointInfo]:
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)
    summaries = [{"step": 10 * n, "metrics": {} if x is None else {"loss": x}} for n, x in enumerate(_LOSSES)]
    return [CheckpointInfo(Path(str(n)), 1, "0", moment, 0, {}, summary) for n, summary in enumerate(summaries)]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"last": 0}, ""),
        ({"last": 2}, "56"),
        ({"last": 99}, "0123456"),
        ({"best": 1, "metric": "loss"}, "1"),
        ({"best": 2, "metric": "loss"}, "14"),
        ({"best": 1, "metric": "loss", "mode": "max"}, "0"),
        ({"best": 99, "metric": "loss"}, "01346"),
        ({"best": 1, "metric": "accuracy"}, ""),
        ({"every": 30}, "036"),
        ({"every": 50, "last": 1, "best": 1, "metric": "loss"}, "0156"),
    ],
)
def test_a_checkpoint_is_kept_if_any_rule_keeps_it(rules: dict[str, Any], kept: str) -> None:
    assert retain(_infos(), **rules) == {Path(name) for name in kept}


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({}, "expected at least one of last, best and every"),
        ({"best": 1}, "best: expected also the metric"),
        ({"last": -1}, "last: expected a number of at least 0, got -1"),
        ({"every": 0}, "every: expected a number of at least 1, got 0"),
        ({"last": 1, "mode": "minimum"}, "mode: expected 'min' or 'max', got 'minimum'"),
    ],
)
def test_invalid_retention_rules_are_rejected(rules: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        retain(_infos(), **rules)


def _save_five(directory: Path) -> None:
    for step in range(5):
        save(directory / f"step-{step}", {}, summary={"step": step, "metrics": {"loss": abs(step - 1)}})


def test_pruning_removes_checkpoints_that_no_rule_keeps(tmp_path: Path) -> None:
    _save_five(tmp_path)
    removed = prune(tmp_path, last=2, best=1, metric="loss")
    assert [path.name for path in removed] == ["step-0", "step-2"]
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["step-1", "step-3", "step-4"]


def test_a_dry_run_of_pruning_removes_nothing(tmp_path: Path) -> None:
    _save_five(tmp_path)
    assert len(prune(tmp_path, last=1, dry_run=True)) == 4
    assert len(list_checkpoints(tmp_path)) == 5


def test_pruning_applies_only_to_matching_names(tmp_path: Path) -> None:
    for number, name in enumerate(["ck_1", "best", "ck_2", "ck_3"]):
        save(tmp_path / name, {}, summary={"batches": number})
    removed = prune(tmp_path, last=1, pattern="ck_*")
    assert sorted(path.name for path in removed) == ["ck_1", "ck_2"]
    assert (tmp_path / "best").exists()


def test_pruning_always_keeps_the_newest_checkpoint(tmp_path: Path) -> None:
    _save_five(tmp_path)
    prune(tmp_path, last=0)
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["step-4"]


def test_pruning_does_not_restore_an_older_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    save(tmp_path / "a", {}, summary={"step": 1})
    (tmp_path / "a").rename(tmp_path / ".old-a.0123abcd")
    (tmp_path / "a.new").mkdir()
    for file in (tmp_path / ".old-a.0123abcd").iterdir():
        (tmp_path / "a.new" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "a.new").rename(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for file in (tmp_path / "a").iterdir():
        (tmp_path / "b" / file.name).write_bytes(file.read_bytes())
    prune(tmp_path, last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


_EXPERIMENT = [
    *(TrialCheckpoint(n, 1, x) for n, x in [(1, None), (2, None), (3, 0.6), (4, 0.5), (5, 0.4)]),
    *(TrialCheckpoint(n, 2, x) for n, x in [(6, None), (7, 0.2), (8, 0.3), (9, None), (10, None)]),
]


@pytest.mark.parametrize(
    ("experiment_best", "trial_best", "trial_latest", "kept"),
    [
        (0, 0, 0, set()),
        (2, 0, 0, {7, 8}),
        (5, 0, 0, {3, 4, 5, 7, 8}),
        (9, 0, 0, {3, 4, 5, 7, 8}),
        (0, 1, 0, {5, 7}),
        (0, 3, 0, {3, 4, 5, 7, 8}),
        (0, 9, 0, {3, 4, 5, 7, 8}),
        (0, 0, 1, {5, 10}),
        (0, 0, 3, {3, 4, 5, 8, 9, 10}),
        (2, 1, 0, {5, 7, 8}),
        (2, 0, 1, {5, 7, 8, 10}),
        (0, 1, 1, {5, 7, 10}),
        (2, 1, 1, {5, 7, 8, 10}),
    ],
)
def test_experiments_keep_the_union_of_three_rules(
    experiment_best: int, trial_best: int, trial_latest: int, kept: set[int]
) -> None:
    assert experiment_retention(_EXPERIMENT, experiment_best, trial_best, trial_latest) == kept


def test_the_best_checkpoint_can_have_the_largest_metric() -> None:
    assert experiment_retention(_EXPERIMENT, 2, 1, 0, smaller_is_better=False) == {3, 4, 8}


def test_nan_is_never_the_best_metric() -> None:
    checkpoints = [TrialCheckpoint(1, 1, float("nan")), TrialCheckpoint(2, 1, 0.5)]
    assert experiment_retention(checkpoints, 2, 2, 0) == {2}


class _Meanwhile(Files):
    """Lets another process act once, just before a checkpoint is renamed."""

    def __init__(self, act: Callable[[Path], object]) -> None:
        self._act: Callable[[Path], object] | None = act

    def rename(self, source: Path, target: Path) -> None:
        act, self._act = self._act, None
        if act is not None:
            act(source)
        super().rename(source, target)


def test_a_checkpoint_removed_by_another_process_is_not_an_error(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path / str(step), {}, summary={"step": step})
    assert prune(tmp_path, last=1, files=_Meanwhile(shutil.rmtree)) == [tmp_path / "1"]
    assert os.listdir(tmp_path) == ["2"]


def test_a_checkpoint_that_another_process_replaced_is_kept(tmp_path: Path) -> None:
    for step in range(4):
        save(tmp_path / str(step), {}, summary={"step": step})
    meanwhile = _Meanwhile(lambda _: save(tmp_path / "2", {"a": "new"}, summary={"step": 9}))
    assert prune(tmp_path, last=1, files=meanwhile) == [tmp_path / "0", tmp_path / "1"]
    assert load(tmp_path / "2") == {"a": "new"}


def test_an_unknown_metric_removes_no_checkpoint(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path / str(step), {}, summary={"step": step, "metrics": {"loss": 0.5}})
    with pytest.raises(UnknownNameError, match="unknown metric 'lose': did you mean 'loss'"):
        prune(tmp_path, best=1, metric="lose")
    assert len(list_checkpoints(tmp_path)) == 3


def test_a_metric_without_a_number_to_keep_is_rejected() -> None:
    with pytest.raises(ConfigError, match="metric: 'loss' has no effect without best"):
        retain(_infos(), last=1, metric="loss")
