"""Experiment files as Determined's users write them: trial classes and its launcher as entrypoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("optuna", reason="the extra 'search' is not installed")

from dovetail.search import Experiment, ExperimentRecord, Store
from dovetail.search.processes import Attempt

pytestmark = [pytest.mark.slow]

TRIALS = Path(__file__).parents[1] / "pytorch" / "trials.py"
MODEL = """
import os
from pathlib import Path

from trials import Classifier


class MyTrial(Classifier):
    def __init__(self, context):
        super().__init__(context)
        self.optimizer.param_groups[0]["lr"] = context.get_hparam("learning_rate")

    def train_batch(self, batch, epoch_idx, batch_idx):
        dies = self.context.get_data_config().get("dies")
        if batch_idx == dies and Path(os.environ["DOVETAIL_ATTEMPT"]).name == "0":
            os._exit(1)
        return super().train_batch(batch, epoch_idx, batch_idx)
"""
SCRIPT = """
from dovetail import core, pytorch
from model_def import MyTrial

distributed = core.DistributedContext.from_torch_distributed()
with pytorch.init(distributed=distributed) as context:
    pytorch.Trainer(MyTrial(context), context).fit(reporting_period=pytorch.Batch(4))
print("ranks", distributed.size)
"""
CONFIG: dict[str, Any] = {
    "entrypoint": "model_def:MyTrial",
    "hyperparameters": {"learning_rate": {"type": "categorical", "vals": [0.1, 0.3]}, "global_batch_size": 8},
    "searcher": {"name": "grid", "metric": "loss", "max_length": {"batches": 12}},
    "min_validation_period": {"batches": 5},
    "min_checkpoint_period": {"batches": 5},
    "scheduling_unit": 4,
    "max_restarts": 1,
}


def run(folder: Path, **changes: Any) -> ExperimentRecord:
    code = folder / "code"
    code.mkdir()
    shutil.copy(TRIALS, code)
    (code / "model_def.py").write_text(MODEL)
    (code / "train.py").write_text(SCRIPT)
    (folder / "experiment.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    done = Experiment.from_yaml(folder / "experiment.yaml", code).run(Store.open(folder / "home"))
    assert done.state == "COMPLETED", [trial.reason for trial in done.trials]
    return done


@pytest.fixture(scope="module")
def by_class(tmp_path_factory: pytest.TempPathFactory) -> ExperimentRecord:
    return run(tmp_path_factory.mktemp("class"))


def test_every_trial_of_a_class_follows_the_file(by_class: ExperimentRecord) -> None:
    assert [trial.hparams["learning_rate"] for trial in by_class.trials] == [0.1, 0.3]
    assert [list(trial.values) for trial in by_class.trials] == [[5, 10, 12], [5, 10, 12]]
    assert by_class.trials[0].values != by_class.trials[1].values


def test_a_killed_class_trial_resumes_from_its_checkpoint(by_class: ExperimentRecord, tmp_path: Path) -> None:
    done = run(tmp_path, data={"dies": 7})
    assert [trial.restarts for trial in done.trials] == [1, 1]
    assert [[a.exit_code for a in Attempt.all_of(trial.directory)] for trial in done.trials] == [[1, 0], [1, 0]]
    assert [trial.values for trial in done.trials] == [trial.values for trial in by_class.trials]


@pytest.mark.filterwarnings("ignore:.*keys without an effect here are ignored. scheduling_unit")
@pytest.mark.parametrize(
    ("slots", "entrypoint"), [(1, "train.py"), pytest.param(2, "-- python3 train.py", marks=pytest.mark.torture)]
)
def test_the_launcher_of_determined_starts_a_process_per_slot(
    by_class: ExperimentRecord, tmp_path: Path, slots: int, entrypoint: str
) -> None:
    hyperparameters = {"learning_rate": 0.1, "global_batch_size": 8, "batch_size": 8 // slots}
    done = run(
        tmp_path,
        entrypoint=f"python3 -m determined.launch.torch_distributed {entrypoint}",
        hyperparameters=hyperparameters,
        resources={"slots_per_trial": slots},
    )
    (trial,) = done.trials
    assert (trial.directory / "log.txt").read_text().count(f"ranks {slots}\n") == slots
    if slots == 1:
        # The searcher gives trial 0 of both experiments the same seed.
        assert trial.values == by_class.trials[0].values
