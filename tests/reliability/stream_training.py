"""One process of a run over a stream: `python stream_training.py FOLDER LIBRARY NUM_WORKERS KILL_AT`.

It resumes from the newest checkpoint, writes the samples of each of its batches to `FOLDER/samples`, and kills itself
after the step KILL_AT; 0 means that it trains to the end of the second epoch.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from stream_cells import LIBRARIES, VISION
from torch import nn
from torch.utils.data import DataLoader

from dovetail import Batches, Epochs
from dovetail.callbacks import LambdaCallback
from dovetail.trainers import DDPTrainer, Trainer

BATCH_SIZE = 4


class Position:
    """A loader with `state_dict`, but without `split`."""

    def __init__(self) -> None:
        self.following = 0

    def __iter__(self) -> Any:
        while self.following < 30:
            first, self.following = self.following * BATCH_SIZE, self.following + 1
            yield {"id": torch.arange(first, first + BATCH_SIZE)}
        self.following = 0

    def state_dict(self) -> dict[str, int]:
        return {"following": self.following}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.following = state["following"]


def torchdata(num_workers: int) -> Any:
    torchdata = importlib.import_module("torchdata.stateful_dataloader")
    samples = [{"id": number} for number in range(120)]
    return torchdata.StatefulDataLoader(samples, batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers)


def make_data(library: str, folder: Path, num_workers: int) -> Any:
    if library == "a loader with state_dict":
        return Position()
    if library == "torchdata":
        return torchdata(num_workers)
    if library == "MosaicML streaming":
        VISION["enable"]()
        if "RANK" in os.environ:
            # Otherwise the library creates and destroys a group of its own twice, at one port. If a process is slow,
            # the others then wait in the store of the earlier group.
            torch.distributed.init_process_group("gloo")
    (folder / "data").mkdir(exist_ok=True)
    return DataLoader(LIBRARIES[library](folder / "data"), batch_size=BATCH_SIZE, num_workers=num_workers)


def main(folder: Path, library: str, num_workers: int, kill_at: int) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    log = folder / "samples" / str(rank)

    class Recording(Trainer):
        def train_step(self, batch: Any) -> Any:
            progress = self.context.progress
            if not self.context.run.batch.is_idle:
                with log.open("a") as file:
                    row = {"step": progress.batches, "epoch": progress.epoch, "samples": batch["id"].tolist()}
                    file.write(json.dumps(row) + "\n")
            return {"loss": self.model(batch["id"][:, None].float()).square().mean()}

    def die(context: Any, output: Any) -> None:
        if context.progress.batches == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    trainer: Any = Recording(
        nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.3)),
        "cpu",
        seed=3,
        learning_rate=1e-3,
        checkpoint_dir=folder / "checkpoints",
        verbose=False,
    )
    trainer.context.callbacks.add(LambdaCallback(on_step_end=die))
    if world > 1:
        trainer = DDPTrainer(trainer)
    data = make_data(library, folder, num_workers)
    trainer.fit(data, max_length=Epochs(2), checkpoint_period=Batches(2), resume="auto")


if __name__ == "__main__":
    # Notes about what a library reads again, and warnings of the library itself.
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
