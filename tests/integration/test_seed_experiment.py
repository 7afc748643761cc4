"""The experiment and the job of the seed, as printed, by the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="the extra 'search' is not installed")

pytestmark = [pytest.mark.slow]

CODE = Path(__file__).parents[2] / "examples" / "trial"
AS_PRINTED = """
entrypoint_script: python3 train.py
hyperparameters:
    global_batch_size:
        type: categorical
        vals: [16, 32, 64]
searcher:
    name: "grid"
    max_length:
        epochs: 20
"""


def dovetail(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dovetail", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CODE, tmp_path / "code"))


def test_the_hyperparameter_that_the_seed_leaves_out_is_named_in_a_sentence(code: Path) -> None:
    (code / "seed.yaml").write_text(AS_PRINTED + "max_restarts: 0\n")
    done = dovetail(
        code,
        "experiment",
        "create",
        "seed.yaml",
        ".",
        "--set",
        "searcher.name=single",
        "--set",
        "hyperparameters.global_batch_size=16",
    )
    assert done.returncode == 3
    assert "unknown hyperparameter 'learning_rate'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_grid_of_the_seed_runs_as_printed(code: Path) -> None:
    # The printed script reads a learning rate that the printed file does not give.
    script = (code / "train.py").read_text()
    (code / "train.py").write_text(script.replace('context.hparams["learning_rate"]', "0.1"))
    (code / "grid.yaml").write_text(AS_PRINTED)
    done = dovetail(code, "experiment", "create", "grid.yaml", ".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best loss (first reported, smaller is better) " in done.stdout.splitlines()[-1]
    record = json.loads(dovetail(code, "experiment", "describe", "1", "--json").stdout)
    assert [trial["hparams"] for trial in record["trials"]] == [{"global_batch_size": size} for size in (16, 32, 64)]
    assert {trial["state"] for trial in record["trials"]} == {"COMPLETED"}
    assert (record["metric"], record["is_first_metric"], record["best_trial"]) == ("loss", True, 0)


def test_the_grid_is_searched_and_its_best_trial_predicts(code: Path) -> None:
    done = dovetail(code, "experiment", "create", "grid.yaml", ".")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(dovetail(code, "experiment", "describe", "1", "--json").stdout)
    assert [trial["hparams"]["global_batch_size"] for trial in record["trials"]] == [16, 32, 64]
    assert {trial["state"] for trial in record["trials"]} == {"COMPLETED"}
    best = json.loads(dovetail(code, "experiment", "best", "1", "--json").stdout)
    assert best["hparams"]["global_batch_size"] == 16

    config = (code / "batch_inference.yaml").read_text().replace("trial_id: 0", f"trial_id: {best['id']}")
    (code / "batch_inference.yaml").write_text(config)
    done = dovetail(code, "job", "run", "batch_inference.yaml", ".")
    assert done.returncode == 0, done.stderr
    assert "result: losses of 4 batches, the largest 0.000000" in done.stdout
