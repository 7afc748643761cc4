"""Trial classes that the launcher trains, against scripts that call `fit`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ConfigError
from dovetail.info import VARIABLE
from dovetail.pytorch.entrypoint import load_trial_class

pytestmark = [pytest.mark.usefixtures("forking")]

MODEL = """
import torch
import dovetail as det
from dovetail import pytorch


class OneVar(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.scale = context.get_data_config()["scale"]
        torch.manual_seed(0)
        self.model = context.wrap_model(torch.nn.Linear(1, 1, False))
        lr = context.get_hparam("learning_rate")
        if lr > 9:
            raise det.InvalidHP("too fast")
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=lr))

    def _loader(self):
        x = torch.linspace(-1, 1, 24)[:, None]
        data = torch.utils.data.TensorDataset(x, self.scale * x)
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    build_training_data_loader = _loader
    build_validation_data_loader = _loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        x, y = batch
        return {"loss": torch.nn.functional.mse_loss(self.model(x), y)}


class NoTrial:
    pass
"""
SCRIPT = """
from dovetail import pytorch
from model_def import OneVar

with pytorch.init(aggregation_frequency=2) as context:
    trainer = pytorch.Trainer(OneVar(context), context)
    trainer.fit(
        max_length=pytorch.Batch(15),
        validation_period=pytorch.Batch(4),
        checkpoint_period=pytorch.Epoch(1),
        reporting_period=pytorch.Batch(3),
        checkpoint_policy="all",
        step_zero_validation=True,
    )
"""
CONSTANTS = """
hyperparameters: {learning_rate: 0.1, global_batch_size: 4}
data: {scale: 2.0}
"""
CONFIG = f"""{CONSTANTS}
entrypoint: model_def:OneVar
searcher: {{name: single, metric: loss, max_length: {{batches: 15}}}}
min_validation_period: {{batches: 4}}
min_checkpoint_period: {{epochs: 1}}
perform_initial_validation: true
checkpoint_policy: all
scheduling_unit: 3
optimizations: {{aggregation_frequency: 2}}
"""


GROUPS = ("training", "validation")


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dovetail.launch", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model_def.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "constants.yaml").write_text(CONSTANTS)
    return tmp_path


def rows(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = launch(folder, *arguments)
    assert done.returncode == 0, done.stderr
    path = folder / "checkpoints" / "trial_0" / "metrics.jsonl"
    found = reports(path)
    path.unlink()
    return found


def reports(path: Path) -> list[dict[str, Any]]:
    """Return the reports in a file without their times."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints" / "trial_0").iterdir() if path.is_dir())


def test_a_class_trains_as_a_script_with_the_same_settings(folder: Path) -> None:
    by_class = rows(folder, "--config", "config.yaml", "model_def:OneVar")
    written = checkpoints(folder)
    (folder / "checkpoints").rename(folder / "before")
    by_script = rows(folder, "--config", "constants.yaml", "train.py")
    assert by_class == by_script
    assert written == checkpoints(folder)
    reported = {group: [row["steps_completed"] for row in by_class if row.get("group") == group] for group in GROUPS}
    # Training is reported every third batch, and where a validation or a checkpoint is due.
    assert reported == {"training": [3, 4, 6, 8, 9, 12, 15], "validation": [0, 4, 8, 12, 15]}


@pytest.mark.parametrize(
    ("searcher", "batches"),
    [
        ("{name: single, metric: loss, max_length: {records: 20}}", 5),
        ("{name: async_halving, metric: loss, num_rungs: 1, max_trials: 1, time_metric: epochs, max_time: 1}", 6),
    ],
)
def test_the_length_of_a_class_trial_is_that_of_the_searcher(folder: Path, searcher: str, batches: int) -> None:
    (folder / "length.yaml").write_text(f"{CONSTANTS}\nsearcher: {searcher}\n")
    found = rows(folder, "--config", "length.yaml", "model_def:OneVar")
    assert max(row["steps_completed"] for row in found if "group" in row) == batches


@pytest.mark.slow
def test_two_slots_train_a_class_together(folder: Path) -> None:
    alone = rows(folder, "--config", "config.yaml", "model_def:OneVar")
    (folder / "checkpoints").rename(folder / "before")
    both = rows(folder, "--config", "config.yaml", "--slots", "2", "model_def:OneVar")
    assert [row.get("steps_completed") for row in both] == [row.get("steps_completed") for row in alone]
    for one, two in zip(alone, both, strict=True):
        assert one.get("metrics", {}) == pytest.approx(two.get("metrics", {}), rel=1e-5)


def test_invalid_hyperparameters_in_the_constructor_are_reported(folder: Path) -> None:
    done = launch(folder, "--config", "config.yaml", "--hparam", "learning_rate=10", "model_def:OneVar")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "dovetail.errors.InvalidHP: too fast")
    assert reports(folder / "checkpoints" / "trial_0" / "metrics.jsonl") == [{"exited": "INVALID_HP"}]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "config.yaml", "model_de:OneVar"],
         "script: expected the module of the trial class model_de:OneVar, got 'model_de': there is none in "),
        (["--config", "config.yaml", "model_def:OneVra"],
         "unknown trial class of model_def (entrypoint) 'OneVra': did you mean 'OneVar'? (known: OneVar)"),
        (["--config", "config.yaml", "model_def:NoTrial"],
         "entrypoint: expected a subclass of dovetail.pytorch.PyTorchTrial, got <class 'model_def.NoTrial'>: import"),
        (["--config", "config.yaml", "model_def:OneVar", "--fast"],
         "script: expected no arguments after the trial class model_def:OneVar, got '--fast'"),
        (["--config", "constants.yaml", "model_def:OneVar"],
         "constants.yaml:2:1: searcher.max_length: missing: how long to train model_def:OneVar, such as {epochs: 10}"),
        (["model_def:OneVar"], "searcher.max_length: missing: how long to train model_def:OneVar"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_class_name_raises_one_sentence(folder: Path, arguments: list[str], sentence: str) -> None:
    done = launch(folder, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dovetail.launch: {sentence}")


def test_an_error_in_the_module_keeps_its_traceback(folder: Path) -> None:
    (folder / "model_def.py").write_text("import not_there\n")
    done = launch(folder, "--config", "config.yaml", "model_def:OneVar")
    assert done.returncode == 1
    assert 'model_def.py", line 1' in done.stderr
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'not_there'"


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ConfigError, match="expected the name of a module and a class, got 'not_there:A': No module"):
        load_trial_class("not_there:A")
