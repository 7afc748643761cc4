from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from forked import run

from dovetail import checkpoint
from dovetail.history import History

EXAMPLES = Path(__file__).parents[2] / "examples"
CLASSIFIER = EXAMPLES / "digits_classifier.py"

# The longest ones, of which others show the same parts.
LONG = ("causal_pretraining", "instruction_tuning", "language_model", "seq2seq", "trial_gan")

pytestmark = [pytest.mark.full_size, pytest.mark.slow]


def result(done: CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()[-1]


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.torture] if name in LONG else [])
        for name in sorted(path.stem for path in set(EXAMPLES.glob("*.py")) - {CLASSIFIER})
    ],
)
def test_example_learns_and_writes_only_to_runs(name: str, tmp_path: Path) -> None:
    assert result(run(EXAMPLES / f"{name}.py", folder=tmp_path)).startswith("result: ")
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}


@pytest.mark.torture
def test_the_classifier_gives_the_same_result_again_in_the_same_folder(tmp_path: Path) -> None:
    # As a user does.
    command = [sys.executable, "-W", "error", str(CLASSIFIER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first, second = (
        result(subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240))
        for _ in range(2)
    )
    assert first == second
    assert float(first.removeprefix("result: test accuracy ").split("%")[0]) >= 97

    folder = tmp_path / "runs" / "digits"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    names = [info.path.name for info in checkpoint.list_checkpoints(folder)]
    epochs = len(History.load(folder / "ck_history.jsonl").get_metric_values("valid_loss"))
    assert names == ["best_ck", f"ck_epoch_{epochs}_iter_{epochs * 19}"]
    for name in names:
        checkpoint.verify(folder / name)
