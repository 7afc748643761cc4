"""`dovetail checkpoint export`, and checkpoints of trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.checkpoint import load_model_file, save
from dovetail.search.store import Store


@pytest.fixture
def trial(project: Any) -> Path:
    """The folder of trial 1, which has two checkpoints; the second is the best."""
    from dovetail.search.schema import read_experiment

    store = Store.open(project.home)
    record = store.create_experiment(read_experiment(project.config), "", project.code)
    number = store.add_trial(record.id, {}, {}, {"width": 2})
    folder = store.trial(number).directory
    for name, value in (("best_ck", 2.0), ("ck_epoch_9_iter_9", 1.0)):
        save(folder / name, {"model": {"weight": torch.full((3,), value)}}, summary={"step": 9})
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_export_writes_the_weights_of_a_checkpoint(run: Any, trial: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    assert run("checkpoint", "export", trial / "ck_epoch_9_iter_9", "-o", target) == (0, f"{target}\n", "")
    assert load_model_file(target)["weight"].tolist() == [1.0, 1.0, 1.0]


def test_export_rejects_the_suffix_of_another_format(run: Any, tmp_path: Path) -> None:
    save(tmp_path / "best_ck", {"model": {"weight": torch.ones(2)}})
    code, out, err = run("checkpoint", "export", tmp_path / "best_ck", "-o", tmp_path / "b.onnx")
    assert (code, out) == (1, "")
    assert err.startswith(f"dovetail: unknown suffix of a file of weights ({tmp_path}/b.onnx) '.onnx': ")
    assert err.endswith("(known: .bin, .ckpt, .pt, .pth, .safetensors)\n")
    assert not (tmp_path / "b.onnx").exists()


def test_export_of_a_trial_uses_its_best_checkpoint(run: Any, trial: Path, project: Any, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    code, _, _ = run("checkpoint", "export", "--trial", 1, "-o", target, "--home", project.home)
    assert code == 0
    assert load_model_file(target)["weight"].tolist() == [2.0, 2.0, 2.0]


def test_a_trial_without_checkpoints_is_a_usage_error(run: Any, finished: Any, tmp_path: Path) -> None:
    code, _, err = run("checkpoint", "export", "--trial", 1, "-o", tmp_path / "m.pt", "--home", finished.home)
    assert code == 1
    assert err.startswith("dovetail: trial 1 has no checkpoints in ")


def test_a_checkpoint_without_a_model_is_a_usage_error(run: Any, tmp_path: Path) -> None:
    save(tmp_path / "other", {"epoch": 1})
    code, _, err = run("checkpoint", "export", tmp_path / "other", "-o", tmp_path / "m.pt")
    assert (code, err) == (1, f"dovetail: {tmp_path}/other: there is no model in it (it has: epoch)\n")


def test_list_accepts_a_trial_instead_of_a_path(run: Any, trial: Path, project: Any) -> None:
    code, out, _ = run("checkpoint", "list", "--trial", 1, "--home", project.home)
    assert code == 0
    assert out == run("checkpoint", "list", trial)[1]


def test_a_path_together_with_a_trial_is_a_usage_error(run: Any, trial: Path, project: Any) -> None:
    code, _, err = run("checkpoint", "list", trial, "--trial", 1, "--home", project.home)
    assert (code, err) == (1, "dovetail: which checkpoints: expected a path or --trial ID, got both\n")
