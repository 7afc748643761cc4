"""Training in a process group that the user's script has made: `user_group_ranks.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from dovetail import Epochs
from dovetail.trainers import DDPTrainer, Trainer


def train(backend: str, folder: Path) -> list[float]:
    """Return the sums of the weights and of the predictions after two runs in a group with a backend."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(str(folder / backend.replace(":", "-")), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    # Gradients of several buckets, so that they travel during the backward pass, by separate connections.
    model = nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 600), nn.Linear(600, 2)).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    data = x, (x.sum(dim=1) > 0).long()
    trainer = DDPTrainer(Trainer(model, "cpu", batch_size=5, seed=0, verbose=False))
    for number in (1, 2):
        # Two runs in one group.
        trainer.fit(data, data, max_length=Epochs(number))
    predictions = trainer.predict(x)
    dist.destroy_process_group()
    return [*(it.detach().sum().item() for it in model.parameters()), float(predictions.sum())]


def main(folder: Path) -> None:
    found = {backend: train(backend, folder) for backend in ("gloo", "cuda:gloo")}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
