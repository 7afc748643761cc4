"""What one process does in `test_fsdp_background.py`: `python background_ranks.py FOLDER`, with torchrun's variables.

A run of eight batches saves every second one, in the foreground, in the background, and in the background with a
resume from its middle. `FOLDER/kill` has the number of file operations of rank 0 after which it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dovetail import Batches
from dovetail.callbacks import Callback
from dovetail.checkpoint import CheckpointWarning
from dovetail.distributed import PeerError
from dovetail.errors import CheckpointError
from dovetail.trainers import FSDPTrainer, Trainer


class Note(Callback):
    def __init__(self) -> None:
        self.saved: list[str] = []

    def on_checkpoint(self, context: Any, path: Path) -> None:
        self.saved.append(path.name)


class Counter(Callback):
    """Counts batches, and in the third one waits in one process until its thread has ended."""

    batches = 0

    def on_step_end(self, context: Any, output: Any) -> None:
        self.batches = context.progress.batches
        if self.batches == 3 and context.process.share.rank == 1:
            wait([context.run.saver.writer._pending], timeout=60)


def train(folder: Path, length: int, *callbacks: Callback, resume: str | None = None, **settings: Any) -> Any:
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
            callbacks=[*callbacks],
            **settings,
        )
    )
    trainer.fit((x, (x.sum(1) > 0).long()), max_length=Batches(length), resume=resume)
    return trainer


def fail(folder: Path, note: Note, failing: contextlib.AbstractContextManager[Any], **settings: Any) -> dict[str, Any]:
    """Train while writes fail, and return the warnings, or the error that ended the run, and after which batch."""
    error, counter = None, Counter()
    with warnings.catch_warnings(record=True) as caught, failing:
        warnings.simplefilter("always")
        try:
            train(folder, 8, note, counter, save_in_background=True, **settings)
        except (CheckpointError, PeerError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    warned = [str(it.message) for it in caught if issubclass(it.category, CheckpointWarning)]
    return {"error": error, "warned": warned, "saved": note.saved, "batches": counter.batches}


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let this process write no larger files, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
    found["resumed"] = summed_up(train(folder / "cut", 8, notes["cut"], resume="auto", save_in_background=True))
    if (folder / "killed").exists():
        trainer = train(folder / "killed", 8, Note(), resume="auto", save_in_background=True)
        found["after the kill"] = summed_up(trainer)
    taken = folder / "taken" / "ck_epoch_0_iter_4"
    taken.parent.mkdir(exist_ok=True)
    # A checkpoint does not replace a file of the user.
    taken.touch()
    found["taken"] = fail(taken.parent, Note(), contextlib.nullcontext(), on_save_error="warn")
    full = files_of_at_most(64) if rank == "1" else contextlib.nullcontext()
    found["full"] = fail(folder / "full", Note(), full)
    found["saved"] = {name: note.saved for name, note in notes.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
