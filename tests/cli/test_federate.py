"""`dovetail federate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dovetail.cli import app
from dovetail.errors import ConfigError

SMALL = ["--set", "clients={total_clients: 4, per_round: 2}", "--set", "trainer.rounds=2"]


def run(*words: str) -> str:
    outcome = CliRunner().invoke(app, ["federate", *words], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_federate_without_a_file_trains_on_digits(tmp_path: Path) -> None:
    lines = run(*SMALL, "--results", str(tmp_path)).splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["round 1/2", "round 2/2"]
    assert lines[-1] == f"written: {tmp_path}/rounds.csv and {tmp_path}/rounds.png"


def test_federate_json_prints_only_json() -> None:
    rounds = json.loads(run(*SMALL, "--json"))
    assert [it["round"] for it in rounds] == [1, 2]
    assert set(rounds[0]["metrics"]) == {"train_loss", "accuracy", "loss"}


def test_federate_continues_after_its_last_checkpoint(tmp_path: Path) -> None:
    whole = json.loads(run(*SMALL, "--set", "trainer.rounds=3", "--json"))
    run(*SMALL, "--checkpoints", str(tmp_path), "--json")
    rest = json.loads(run(*SMALL, "--set", "trainer.rounds=3", "--checkpoints", str(tmp_path), "--json"))
    assert [it["metrics"] for it in rest] == [it["metrics"] for it in whole]


def test_a_mistake_in_the_file_is_printed_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text("trainer:\n  ronds: 3\n")
    with pytest.raises(ConfigError, match=r"config.yml:2:3: trainer.ronds: unknown key: did you mean 'rounds'\?"):
        CliRunner().invoke(app, ["federate", str(file)], catch_exceptions=False)
