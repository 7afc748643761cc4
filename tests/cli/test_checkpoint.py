"""`dovetail checkpoint …`, and what every command shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dovetail.checkpoint import list_checkpoints, save

# typer 0.20 takes names from click that click 8.5 deprecates.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call the command line in this process and return its exit code, stdout and stderr."""
    from dovetail.cli import main

    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["dovetail", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            main()
        return leaving.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for step, loss in enumerate([0.5, 0.25, 0.75]):
        state = {"weight": torch.ones(4), "step": step}
        save(tmp_path / f"step-{step}", state, summary={"step": step, "metrics": {"loss": loss}})
    return tmp_path


def _damage(path: Path) -> None:
    with open(path / "tensors.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def test_the_version_option_prints_the_package_version(run: Any) -> None:
    assert run("--version") == (0, f"dovetail {metadata.version('dovetail')}\n", "")


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, dovetail.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_runs_as_a_module(runs: Path) -> None:
    command = [sys.executable, "-m", "dovetail", "checkpoint", "verify", str(runs / "step-0")]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.startswith(f"{runs / 'step-0'}: intact")


def test_a_mistake_prints_one_sentence_and_exits_with_1(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    sentence = f"dovetail: {path}: no checkpoint there: the path does not exist\n"
    assert run("checkpoint", "verify", path) == (1, "", sentence)


def test_verify_names_the_damaged_file(run: Any, runs: Path) -> None:
    _damage(runs / "step-1")
    code, out, err = run("checkpoint", "verify", runs / "step-1")
    assert (code, out) == (1, "")
    assert "step-1/tensors.safetensors: the file is damaged" in err


def test_inspect_shows_files_and_summary(run: Any, runs: Path) -> None:
    code, out, _ = run("checkpoint", "inspect", runs / "step-1")
    assert code == 0
    assert "tensors.safetensors" in out
    assert '{"loss": 0.25}' in out


def test_inspect_prints_json(run: Any, runs: Path) -> None:
    _, out, _ = run("checkpoint", "inspect", runs / "step-1", "--json")
    found = json.loads(out)
    assert found["step"] == 1
    assert found["summary"] == {"step": 1, "metrics": {"loss": 0.25}}
    assert found["files"].keys() == {"state.json", "tensors.safetensors"}


def test_inspect_prints_strict_json_for_nan(run: Any, tmp_path: Path) -> None:
    save(tmp_path / "a", {}, summary={"metrics": {"loss": float("nan")}})
    _, out, _ = run("checkpoint", "inspect", tmp_path / "a", "--json")
    assert json.loads(out)["summary"] == {"metrics": {"loss": "nan"}}


def test_list_shows_checkpoints_in_order(run: Any, runs: Path) -> None:
    code, out, err = run("checkpoint", "list", runs)
    assert (code, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines() if "step-" in line] == ["step-0", "step-1", "step-2"]


def test_list_has_one_line_per_checkpoint_in_80_columns(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.cli import checkpoint

    metrics = {"train_loss": 1.30461, "train_lr": 0.01, "valid_accuracy": 0.87037, "valid_loss": 0.0933331}
    save(runs / "ck_epoch_10_iter_190", {}, summary={"step": 190, "metrics": metrics})
    monkeypatch.setattr(checkpoint, "console", lambda: Console(width=80))
    checkpoint._print_table(list_checkpoints(runs)[-1:])
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("│ ck_epoch_10_iter_190 │  190 │         0.8704 │    0.09333 │ ")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "not shown in 80 columns: train_loss, train_lr, created; --json prints everything"


def test_list_of_an_empty_directory_is_a_sentence(run: Any, tmp_path: Path) -> None:
    assert run("checkpoint", "list", tmp_path) == (0, f"there are no checkpoints in {tmp_path}\n", "")


def test_list_prints_json(run: Any, runs: Path) -> None:
    (runs / "step-1" / "manifest.json").unlink()
    _, out, _ = run("checkpoint", "list", runs, "--json")
    found = json.loads(out)
    assert [item["step"] for item in found["checkpoints"]] == [0, 2]
    assert found["damaged"] == [f"{runs}/step-1/manifest.json: the file is missing"]


def test_list_names_damaged_checkpoints(run: Any, runs: Path) -> None:
    (runs / "step-1" / "manifest.json").unlink()
    code, _, err = run("checkpoint", "list", runs)
    assert (code, err) == (0, f"damaged: {runs}/step-1/manifest.json: the file is missing\n")


def test_a_missing_directory_is_a_usage_error(run: Any, tmp_path: Path) -> None:
    code, _, err = run("checkpoint", "list", tmp_path / "none")
    assert (code, err) == (1, f"dovetail: {tmp_path}/none: there is no such directory\n")


def test_prune_keeps_the_last_and_the_best(run: Any, runs: Path) -> None:
    code, out, _ = run("checkpoint", "prune", runs, "--keep-last", 1, "--keep-best", 1, "--metric", "loss")
    assert (code, out) == (0, f"removed {runs / 'step-0'}\n2 kept, 1 removed\n")
    assert [info.step for info in list_checkpoints(runs)] == [1, 2]


def test_prune_may_keep_the_largest_metric(run: Any, runs: Path) -> None:
    run("checkpoint", "prune", runs, "--keep-best", 1, "--metric", "loss", "--mode", "max")
    assert [info.step for info in list_checkpoints(runs)] == [2]


def test_a_dry_run_of_prune_only_prints(run: Any, runs: Path) -> None:
    _, out, _ = run("checkpoint", "prune", runs, "--keep-last", 2, "--dry-run")
    assert out == f"would remove {runs / 'step-0'}\n2 kept, 1 to remove\n"
    assert len(list_checkpoints(runs)) == 3


def test_prune_without_a_rule_is_a_usage_error(run: Any, runs: Path) -> None:
    code, _, err = run("checkpoint", "prune", runs)
    assert (code, err) == (1, "dovetail: retention: expected at least one of last, best and every\n")


def test_prune_keeps_damaged_checkpoints_and_names_them(run: Any, runs: Path) -> None:
    (runs / "step-0" / "manifest.json").unlink()
    code, out, err = run("checkpoint", "prune", runs, "--keep-last", 1)
    assert (code, out) == (0, f"removed {runs / 'step-1'}\n1 kept, 1 removed\n")
    assert err == f"damaged: {runs}/step-0/manifest.json: the file is missing\n"
    assert (runs / "step-0").exists()


def test_prune_with_a_misspelled_metric_removes_nothing(run: Any, runs: Path) -> None:
    code, _, err = run("checkpoint", "prune", runs, "--keep-best", 1, "--metric", "lose")
    assert (code, err) == (1, "dovetail: unknown metric 'lose': did you mean 'loss'? (known: loss)\n")
    assert len(list_checkpoints(runs)) == 3


@pytest.mark.parametrize("options", [("--mode", "max"), ("--metric", "loss")])
def test_an_option_without_its_required_option_is_a_usage_error(run: Any, runs: Path, options: tuple[str, str]) -> None:
    code, _, err = run("checkpoint", "prune", runs, "--keep-last", 1, *options)
    assert code == 1
    assert f"{options[0].removeprefix('--')}: {options[1]!r} has no effect without" in err
    assert len(list_checkpoints(runs)) == 3
