"""What one process of a group does in `test_leaving.py`: train, and end as any script does."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from dovetail import Epochs
from dovetail.trainers import DDPTrainer, Trainer


def write_threads(file: Path) -> None:
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    file.write_text(json.dumps(names), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The first registered function is called last, after the group was destroyed.
    atexit.register(write_threads, Path(sys.argv[1]) / f"{os.environ['RANK']}.json")
    inputs = torch.randn(16, 4)
    trainer = DDPTrainer(Trainer(nn.Linear(4, 2), "cpu", batch_size=4, verbose=False))
    trainer.fit((inputs, (inputs.sum(dim=1) > 0).long()), max_length=Epochs(1))
