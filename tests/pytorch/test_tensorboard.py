from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail import pytorch
from dovetail.info import VARIABLE, TrialInfo, write_info

accumulators: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = accumulators.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(it.step, it.value) for it in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_determined_writer_writes_to_the_folder_of_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.tensorboard.metric_writers.pytorch import TorchWriter

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.warns(FutureWarning, match=r"into checkpoints.trial_0.tensorboard: in a trial use context\.get_t"):
        writer = TorchWriter()
    writer.add_scalar("mine", 0.5, 1)
    writer.writer.add_scalar("mine", 0.25, 2)
    writer.flush()
    writer.reset()
    folder = pytorch.init(hparams={}, verbose=False).get_tensorboard_path()
    assert scalars(folder) == {"mine": [(1, 0.5), (2, 0.25)]}


def test_a_writer_finds_the_folder_of_a_launched_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_info(tmp_path / "trial.json", TrialInfo(trial_id=4, directory=str(tmp_path / "trial_4")))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "trial.json"))
    with pytest.warns(FutureWarning, match="trial_4.tensorboard"):
        writer = pytorch.TorchWriter()
    writer.add_scalar("mine", 1.0, 0)
    writer.reset()
    assert scalars(tmp_path / "trial_4" / "tensorboard") == {"mine": [(0, 1.0)]}
