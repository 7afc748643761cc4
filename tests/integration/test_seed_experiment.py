"""The experiment and the job of the seed, as printed, by the command line."""

from __future__ import annotations

import json
import os
import re
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


def test_the_hyperparameter_missing_in_the_seed_document_is_named(code: Path) -> None:
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


SEEDS = Path(__file__).parents[3] / "shared" / "seeds"

# The mistakes of the document, and what it leaves to the reader, by block.
FIXES = {
    "train.py": {
        "import dovetail.pytorch\n": "from dovetail import pytorch\n",
        "preds = self.model(batch)\n": "preds = self.model(data)\n",
    },
    "grid.yaml": {"hyperparameters:\n": "hyperparameters:\n    learning_rate: 0.1\n"},
    "batch_inference.py": {
        "from train.py import": "from train import",
        "my_upload_fn(predictions)": "print('result:', len(predictions), 'predictions')",
    },
    # This machine has two cores.
    "batch_inference.yaml": {"slots: 8": "slots: 2"},
    "commands": {"const.yaml": "grid.yaml"},
}


def printed() -> dict[str, str]:
    """Return the files of document 004 by name, and its commands, with the package renamed and mistakes fixed."""
    (document,) = SEEDS.glob("004*.txt")
    blocks = re.findall(r"^```\w+\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    files = {found.group(1): text for text in blocks if (found := re.match(r"# (\S+)\n", text))}
    files["commands"] = "".join(text for text in blocks if text.startswith("det "))
    for name, fixes in FIXES.items():
        files[name] = re.sub(r"\bdetermined\b", "dovetail", files[name])
        for theirs, ours in fixes.items():
            assert theirs in files[name], theirs
            files[name] = files[name].replace(theirs, ours, 1)
    return files


@pytest.mark.skipif(not SEEDS.is_dir(), reason="THE DESIGN DOCUMENTS ARE NOT BESIDE THE CHECKOUT, SO 004 IS NOT RUN")
def test_the_files_and_commands_of_the_document_run_as_printed(tmp_path: Path) -> None:
    files = printed()
    create, job = (line.split()[1:] for line in files.pop("commands").splitlines())
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    done = dovetail(tmp_path, *create)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best loss (first reported, smaller is better) " in done.stdout.splitlines()[-1]
    record = json.loads(dovetail(tmp_path, "experiment", "describe", "1", "--json").stdout)
    assert [trial["hparams"]["global_batch_size"] for trial in record["trials"]] == [16, 32, 64]
    assert {trial["state"] for trial in record["trials"]} == {"COMPLETED"}
    assert (record["metric"], record["is_first_metric"], record["best_trial_id"]) == ("loss", True, 1)

    trial_id = f"trial_id: {record['best_trial_id']}"
    (tmp_path / "batch_inference.yaml").write_text(files["batch_inference.yaml"].replace("trial_id: 777", trial_id))
    done = dovetail(tmp_path, *job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "result:" in done.stdout


@pytest.mark.torture
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
