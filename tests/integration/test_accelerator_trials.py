"""Trial of an experiment on the pretend device: the values of a CPU, also after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("optuna", reason="the extra 'search' is not installed")

from dovetail.search import Experiment, Store, TrialRecord
from dovetail.search.processes import Attempt

pytestmark = [pytest.mark.slow]

TESTS = Path(__file__).parents[1]
SCRIPT = """
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from dovetail import pytorch
from dovetail.info import get_cluster_info

if get_cluster_info().hparams["device"] == "accelerator":
    from pretend_device import PretendDevice

    device = PretendDevice()
else:
    device = nullcontext()

from trials import Classifier


class Dying(Classifier):
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 7 and Path(os.environ["DOVETAIL_ATTEMPT"]).name == "0":
            os.kill(os.getpid(), 9)
        return super().train_batch(batch, epoch_idx, batch_idx)


with device, pytorch.init() as context:
    trial_class = Dying if context.get_data_config().get("dies") else Classifier
    pytorch.Trainer(context.build_trial(trial_class), context).fit(reporting_period=pytorch.Batch(4))
    print("trained on", context.device.type)
"""
CONFIG: dict[str, Any] = {
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 12}},
    "min_validation_period": {"batches": 5},
    "min_checkpoint_period": {"batches": 5},
    "reproducibility": {"experiment_seed": 3},
    "environment": {"environment_variables": {"PYTHONPATH": f"{TESTS / 'accelerator'}:{TESTS / 'pytorch'}"}},
}


def run(folder: Path, device: str, **changes: Any) -> TrialRecord:
    code = folder / device
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    config = {**CONFIG, "hyperparameters": {"device": device, "dropout": 0.3}, **changes}
    (folder / f"{device}.yaml").write_text(yaml.safe_dump(config))
    done = Experiment.from_yaml(folder / f"{device}.yaml", code).run(Store.open(folder / f"{device}_home"))
    (trial,) = done.trials
    assert done.state == "COMPLETED", (trial.directory / "log.txt").read_text()
    return trial


def test_a_killed_trial_on_an_accelerator_has_the_values_of_a_cpu(tmp_path: Path) -> None:
    on_cpu, killed = run(tmp_path, "cpu"), run(tmp_path, "accelerator", data={"dies": True})
    assert [each.exit_code for each in Attempt.all_of(killed.directory)] == [128 + 9, 0]
    last = [(each.directory / "log.txt").read_text().splitlines()[-1] for each in (on_cpu, killed)]
    assert last == ["trained on cpu", "trained on pretend"]
    assert list(killed.values) == [5, 10, 12]
    assert killed.values == on_cpu.values
