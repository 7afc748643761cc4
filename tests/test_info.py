from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.info import VARIABLE, TrialInfo, get_cluster_info, write_info

INFO = TrialInfo(
    trial_id=7,
    experiment_id=3,
    hparams={"learning_rate": 0.1, "net": {"width": 64}},
    config={"name": "digits", "data": {"url": "file"}},
    user_data={"url": "file"},
    latest_checkpoint="ck",
    trial_seed=11,
    kind="job",
    slots=2,
    directory="runs/7",
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trial.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_a_process_without_a_launcher_has_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert get_cluster_info() is None


@pytest.mark.parametrize("info", [INFO, TrialInfo(trial_id=1)])
def test_written_trial_information_is_read_back(path: Path, info: TrialInfo) -> None:
    write_info(path, info)
    assert get_cluster_info() == info
    assert [each.name for each in path.parent.iterdir()] == ["trial.json"]


def test_determined_scripts_find_the_attributes_they_read() -> None:
    assert INFO.trial.hparams == INFO.hparams
    assert (INFO.trial.trial_id, INFO.trial.trial_seed, INFO.latest_checkpoint) == (7, 11, "ck")
    assert (INFO.slot_ids, INFO.container_addrs, INFO.container_rank) == ([0, 1], ["127.0.0.1"], 0)
    assert (INFO.container_slot_counts, INFO.trial._config) == ([2], INFO.config)
    assert (INFO.task_type, TrialInfo(trial_id=1).task_type) == ("COMMAND", "TRIAL")


@pytest.mark.parametrize(("name", "sentence"), [("session_token", ": there is no master and no agent"), ("hparam", "")])
def test_attributes_known_only_to_a_master_raise_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(AttributeError, match=f"the info of a trial has no '{name}'{sentence}$"):
        getattr(INFO, name)


def test_hyperparameters_that_are_not_json_are_rejected(path: Path) -> None:
    with pytest.raises(ConfigError, match="trial 1 cannot be written as JSON: Object of type set"):
        write_info(path, TrialInfo(trial_id=1, hparams={"layers": {1, 2}}))


def test_a_missing_information_file_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trial\.json \(named by DOVETAIL_TRIAL\): cannot be read: No such file"):
        get_cluster_info()


def altered(**changes: Any) -> str:
    content = {**json.loads(json.dumps(vars(INFO))), **changes}
    return json.dumps({name: value for name, value in content.items() if value != "gone"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"trial_id": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected the fields of a trial, got list"),
        (altered(slots="gone", kind="gone"), "missing kind, slots"),
        (altered(trial_id="7"), "trial_id: expected a whole number, got '7'"),
        (altered(trial_id=True), "trial_id: expected a whole number, got True"),
        (altered(hparams=None), "hparams: expected a mapping, got None"),
        (altered(directory=3), "directory: expected text or null, got 3"),
        (altered(slots=0), "slots: expected at least 1, got 0"),
    ],
)
def test_a_damaged_information_file_is_named_with_its_fault(path: Path, text: str, sentence: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        get_cluster_info()
    assert f"{path} (named by DOVETAIL_TRIAL): {sentence}" in str(caught.value)


def test_an_unknown_field_or_kind_raises_with_the_known_ones(path: Path) -> None:
    path.write_text(altered(hparam={}), encoding="utf-8")
    with pytest.raises(UnknownNameError, match=r"unknown field of .* 'hparam': did you mean 'hparams'"):
        get_cluster_info()
    path.write_text(altered(kind="jobs"), encoding="utf-8")
    with pytest.raises(UnknownNameError, match=r"unknown kind in .* 'jobs': did you mean 'job'"):
        get_cluster_info()


@pytest.mark.parametrize("module", ["dovetail.info", "dovetail.launch"])
def test_reading_information_does_not_import_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
