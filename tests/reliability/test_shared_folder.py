"""Several processes that write and remove checkpoints in one folder."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest

from dovetail.checkpoint import latest, load

_TRAIN = """
import sys, warnings
import torch
from torch import nn
from dovetail import Batches, Epochs
from dovetail.trainers import Trainer

warnings.simplefilter("error")
folder, seed, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)
data = torch.randn(16, 4), torch.randint(0, 2, (16,))
trainer = Trainer(nn.Linear(4, 2), batch_size=4, checkpoint_dir=folder, keep_last=1, seed=seed, verbose=False)
trainer.fit(data, data, max_length=Epochs(epochs), checkpoint_period=Batches(1))
assert trainer.context.progress.batches == 4 * epochs
"""

_PRUNE = """
import sys
from dovetail.cli import main

folder, count = sys.argv[1], int(sys.argv[3])
sys.argv = ["dovetail", "checkpoint", "prune", folder, "--keep-last", "1", "--pattern", "ck_epoch_*"]
for _ in range(count):
    try:
        main()
    except SystemExit as leaving:
        assert not leaving.code, leaving.code
"""


@pytest.mark.full_size
@pytest.mark.slow
def test_trainers_and_prune_commands_share_a_folder(tmp_path: Path) -> None:
    train, prune = tmp_path / "train.py", tmp_path / "prune.py"
    train.write_text(_TRAIN)
    prune.write_text(_PRUNE)
    folder = tmp_path / "runs"
    folder.mkdir()
    epochs, prunes = (60, 300) if os.environ.get("DOVETAIL_TORTURE") == "1" else (8, 40)
    with (tmp_path / "log.txt").open("w") as log:
        processes = [
            forked.start(script, folder, number, count, folder=tmp_path, stdout=log, stderr=log)
            for number, (script, count) in enumerate([(train, epochs)] * 3 + [(prune, prunes)])
        ]
        codes = [process.wait() for process in processes]
    assert codes == [0, 0, 0, 0], (tmp_path / "log.txt").read_text()
    newest = latest(folder)
    assert newest is not None
    assert load(newest)["progress"]["batches"] == 4 * epochs
