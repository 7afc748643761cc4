"""Evidence that a trial has read its hyperparameters and reported its metric."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.info import ATTEMPT, VARIABLE, TrialInfo, get_cluster_info, note_hparams_read, write_info
from dovetail.search.evidence import has_read_hparams, reset_access_time, sentence_about_metric
from dovetail.search.processes import Attempt


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A started trial, represented by this process."""
    path = tmp_path / "info.json"
    write_info(path, TrialInfo(1, hparams={"lr": 0.1}))
    reset_access_time(path)
    attempt = Attempt.of(tmp_path, 0)
    attempt.folder.mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setenv(ATTEMPT, str(attempt.folder))
    return path


def test_reading_the_trial_id_does_not_count_as_reading_hyperparameters(info: Path) -> None:
    found = get_cluster_info()
    assert found is not None
    assert found.trial_id == 1
    assert not has_read_hparams(info.parent, info)


def test_hyperparameters_read_by_the_library_are_recorded(info: Path) -> None:
    found = get_cluster_info()
    assert found is not None
    assert found.hparams == {"lr": 0.1}
    assert has_read_hparams(info.parent, info)


def test_a_program_that_reads_the_file_directly_is_detected(info: Path) -> None:
    assert not has_read_hparams(info.parent, info)
    assert json.loads(info.read_text())["hparams"] == {"lr": 0.1}
    assert has_read_hparams(info.parent, info)


def test_checking_for_reads_writes_nothing_to_the_trial_folder(info: Path) -> None:
    before = sorted(info.parent.rglob("*"))
    has_read_hparams(info.parent, info)
    assert sorted(info.parent.rglob("*")) == before


def test_a_missing_hyperparameter_file_counts_as_read(info: Path) -> None:
    assert has_read_hparams(info.parent, info.parent / "missing.json")


def test_an_attempt_without_a_folder_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ATTEMPT, str(tmp_path / "none"))
    note_hparams_read()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        ({}, "it reported no validation metrics"),
        ({"validation": {"b", "a"}}, "its validation reported a, b"),
        ({"training": {"loss"}, "validation": {"a"}}, "it reported 'loss' in the group 'training' only"),
    ],
)
def test_the_error_lists_the_reported_metrics(reported: dict[str, set[str]], words: str) -> None:
    assert f"the searcher's metric 'loss' ({words}): report it by " in sentence_about_metric("loss", reported)
