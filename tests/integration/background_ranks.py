"""What one process does in `test_fsdp_background.py`: `python background_ranks.py FOLDER`, with torchrun's variables.

A run of eight batches saves every second one, in the foreground, in the background, and in the background with a
resume from its middle. `FOLDER/kill` has the number of file operations of rank 0 after which it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dovetail import Batches
from dovetail.callbacks import Callback
from dovetail.distributed import PeerError
from dovetail.trainers import FSDPTrainer, Trainer


class Note(Callback):
    def __init__(self) -> None:
        self.saved: list[str] = []

    def on_checkpoint(self, context: Any, path: Path) -> None:
        self.saved.append(path.name)


def train(folder: Path, length: int, note: Note, resume: str | None = None, **settings: Any) -> Any:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.BatchNorm1d(7)), nn.Linear(7, 2))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 5, generator=generator)
    trainer = FSDPTrainer(
        Trainer(
            model,
            "cpu",
            optim_function="AdamW",
            batch_size=4,
            seed=3,
            verbose=False,
            checkpoint_dir=folder,
            save_every=2,
            callbacks=[note],
            **settings,
        )
    )
    trainer.fit((x, (x.sum(1) > 0).long()), max_length=Batches(length), resume=resume)
    return trainer


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(it) for name, it in value.items()}
    return [plain(it) for it in value] if isinstance(value, (list, tuple)) else str(value)


def summed_up(trainer: Any) -> Any:
    state = trainer.state_dict()
    return plain({name: state[name] for name in ("model", "optimizers", "progress", "rng") if name in state})


def kill_at(number: int) -> None:
    """Kill this process just before the n-th operation that changes a file of a checkpoint."""
    left = [number]

    def counted(operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    for name in ("open", "replace", "rename", "fsync"):
        setattr(os, name, counted(getattr(os, name)))


def main(folder: Path) -> None:
    rank = os.environ.get("RANK", "0")
    doomed = folder / "kill"
    if doomed.exists():
        if rank == "0":
            kill_at(int(doomed.read_text()))
        try:
            train(folder / "killed", 8, Note(), save_in_background=True)
        except PeerError:
            # Rank 0 is gone.
            sys.exit(0)
        sys.exit(0)
    found: dict[str, Any] = {}
    notes = {name: Note() for name in ("foreground", "background", "cut")}
    found["foreground"] = summed_up(train(folder / "foreground", 8, notes["foreground"]))
    found["background"] = summed_up(train(folder / "background", 8, notes["background"], save_in_background=True))
    train(folder / "cut", 5, notes["cut"], save_in_background=True)
    found["resumed"] = summed_up(train(folder / "cut", 8, notes["cut"], "auto", save_in_background=True))
    if (folder / "killed").exists():
        trainer = train(folder / "killed", 8, Note(), "auto", save_in_background=True)
        found["after the kill"] = summed_up(trainer)
    found["saved"] = {name: note.saved for name, note in notes.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
