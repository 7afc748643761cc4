"""The command `plan`: it plans the first `fit` of a script, and the script ends there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.plan import parse_bytes
from dovetail.errors import ConfigError

SCRIPT = """
import sys
import torch
from dovetail import Epochs
from dovetail.trainers import DDPTrainer, Trainer

print("started with", sys.argv[1:])
trainer = Trainer(torch.nn.Linear(1000, 10), "cpu", batch_size=16, checkpoint_dir="saved", verbose=False)
data = torch.zeros(64, 1000), torch.zeros(64, dtype=torch.long)
before = trainer.evaluate(data)
try:
    DDPTrainer(trainer, num_processes=2).fit(data, max_length=Epochs(3))
except Exception:
    pass
open("finished", "w")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_first_fit_of_a_script_is_planned_and_the_script_ends(run: Any, script: Path) -> None:
    code, printed, errors = run("plan", script, "--gpus", "8", "--memory", "80GB", "--json", "--lr", "3")
    plan = json.loads(printed)
    assert code == 0
    assert (plan["num_processes"], plan["strategy"], plan["fits"]) == (8, "data parallel", True)
    # The gradients, a flag for each of 2 parameters, 8 counts and the weight of the process.
    assert plan["collectives"] == {"all_reduce": 4 * (10_010 + 2 + 8 + 1)}
    assert plan["kinds"]["parameters"] == 4 * 10_010
    assert plan["peak"] == sum(plan["kinds"].values())
    assert "started with ['--lr', '3']" in errors
    assert [it.name for it in script.parent.iterdir()] == ["train.py"]


def test_a_step_that_does_not_fit_ends_with_code_1(run: Any, script: Path) -> None:
    code, printed, _ = run("plan", script, "--memory", "100kB")
    assert code == 1
    assert "does not fit into 100.00 kB" in printed
    assert "the largest part is " in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("24GiB", 24 * 2**30), ("1.5 mb", 1_500_000), ("7", 7), ("2T", 2 * 10**12)]
)
def test_sizes_have_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["lots", "-1GB", "0", "3iB", "1e9"])
def test_a_wrong_size_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="memory: expected a size such as 80GB or 24GiB, got"):
        parse_bytes(text)
