"""One process of a group that a test interrupts: `python group_training.py FOLDER`, with torchrun's variables set.

In its sixth batch it writes a dot and waits for one on its standard input, so that a signal arrives at a known place.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dovetail import Epochs
from dovetail.callbacks import LambdaCallback
from dovetail.trainers import DDPTrainer, Trainer

WAITS_IN_BATCH = 5


class Noisy(Dataset[Any]):
    """Samples with noise from the global generators and from one of the dataset's own."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
        self.rng = random.Random(2)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(6) + random.random() + np.random.random() + self.rng.random()
        return self.inputs[index] + noise, self.inputs[index, :3].argmax()


def make_trainer(folder: Path, num_workers: int | None = None, **layer: Any) -> DDPTrainer:
    """Return a trainer of two processes with dropout, momentum and checkpoints.

    Args:
        folder: Where everything is written.
        num_workers: Data workers of each process, whose samples are augmented; None for tensors in memory.
        layer: Options of the layer.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(100, 6, generator=generator)
    trainer = Trainer(
        model,
        "cpu",
        optim_function="SGD",
        learning_rate=0.1,
        momentum=0.9,
        seed=5,
        batch_size=4,
        drop_last=False,
        train_dataset=(inputs, inputs[:, :3].argmax(dim=1))
        if num_workers is None
        else DataLoader(Noisy(inputs), batch_size=4, shuffle=True, num_workers=num_workers),
        val_dataset=(inputs[:30], inputs[:30, :3].argmax(dim=1)),
        checkpoint_dir=folder / "checkpoints",
        save_every=3,
        keep_last=3,
        verbose=False,
    )
    return DDPTrainer(trainer, **layer)


def outcome(trainer: Any) -> tuple[list[float], list[float], list[dict[str, Any]]]:
    """Return every number of the model, the loss of every batch and the rows of the history."""
    found: list[float] = torch.cat([it.flatten() for it in trainer.model.state_dict().values()]).tolist()
    return found, list(trainer.history.losses), [dict(row) for row in trainer.history]


def wait(context: Any, batch: Any) -> None:
    """Notify the test that the position is reached, and wait until it has acted."""
    if context.progress.batches == WAITS_IN_BATCH:
        os.write(1, b".")
        os.read(0, 1)


def take_host_name(name: str) -> None:
    """Give this process alone another host name, so that its group takes it for a process of another machine."""
    new_uts_namespace = 0x04000000
    assert ctypes.CDLL(None, use_errno=True).unshare(new_uts_namespace) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(name)


if __name__ == "__main__":
    if hosts := os.environ.get("HOSTS"):
        take_host_name(hosts.split()[int(os.environ["RANK"])])
    torch.set_num_threads(1)
    trainer = make_trainer(Path(sys.argv[1]))
    trainer.context.callbacks.add(LambdaCallback(on_step_start=wait))
    trainer.fit(max_length=Epochs(2))
    print("this is never reached")
