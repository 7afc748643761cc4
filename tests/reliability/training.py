"""The training that the tests of this folder interrupt: tiny, and with everything that has state.

Run as a program it forks such trainings on demand: torch is imported once, and a process costs milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Otherwise the first optimizer imports it in every process, which takes seconds.
import torch._dynamo
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dovetail.callbacks import EMA, Callback, CSVLogger, EarlyStopping
from dovetail.trainers import Trainer
from dovetail.units import Batches

__all__ = ["make_trainer", "train"]

BATCHES_PER_EPOCH = 20
NUM_EPOCHS = 6


def make_trainer(
    folder: Path,
    kind: type[Trainer] = Trainer,
    *,
    loader: str = "own",
    patience: int = 4,
    further_callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Trainer:
    """Return a trainer whose every bit of state matters.

    Args:
        folder: Where everything is written.
        kind: The class.
        loader: `own` for ours, with a seed; `torch` for a plain one that draws from the global generator;
            `augmented` for torch's with two workers, whose samples draw from every kind of generator.
        patience: Validations without improvement after which training stops early.
        further_callbacks: Called after the ones that every run has.
        options: Trainer options that differ from the defaults.
    """
    generator = torch.Generator().manual_seed(42)
    inputs = torch.randn(8 * BATCHES_PER_EPOCH + 64, 6, generator=generator)
    targets = (inputs[:, :3] + torch.randn(len(inputs), 3, generator=generator)).argmax(dim=1)
    data = TensorDataset(inputs[:-64], targets[:-64])
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "seed": 7,
        "num_epochs": NUM_EPOCHS,
        "batch_size": 8,
        "accumulation_steps": 3,
        "optimizer": partial(torch.optim.AdamW, lr=0.05),
        "scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=7 * NUM_EPOCHS),
        "callbacks": [
            # Smaller differences depend on the processor, which rounds in its own way.
            EarlyStopping(patience=patience, min_delta=0.002),
            EMA(decay=0.8),
            CSVLogger(folder / "log.csv"),
            *further_callbacks,
        ],
        "train_dataset": _LOADERS[loader](data),
        "val_dataset": (inputs[-64:], targets[-64:]),
        "checkpoint_dir": folder / "checkpoints",
        "save_every": 4,
        "save_best": True,
        "best_metric": "valid_loss",
        "keep_last": 3,
        "verbose": False,
        **options,
    }
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return kind(model, "cpu", **settings)


class Augmented(Dataset[Any]):
    """Samples with noise from the global generators of torch, NumPy and Python, and from one of the dataset's own."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self._samples = samples
        self._own = np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        inputs, target = self._samples[index]
        noise = torch.randn(len(inputs)) + random.gauss(0, 1) + np.random.normal() + float(self._own.normal())
        return inputs + 0.1 * noise, target


_LOADERS: dict[str, Callable[[Dataset[Any]], Any]] = {
    "own": lambda data: data,
    "torch": lambda data: DataLoader(data, batch_size=8, shuffle=True),
    "augmented": lambda data: DataLoader(Augmented(data), batch_size=8, shuffle=True, num_workers=2),
    "persistent": lambda data: DataLoader(
        Augmented(data), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True
    ),
}


def train(folder: Path, *, validate_every: int = 7, **options: Any) -> Trainer:
    """Train from wherever the checkpoints in `folder` stand to the end, and write down what came out."""
    trainer = make_trainer(folder, **options)
    trainer.fit(resume="auto", validation_period=Batches(validate_every))
    trainer.save_model(folder / "model.safetensors")
    trainer.history.save(folder / "history.jsonl")
    return trainer


# --- The nursery --------------------------------------------------------------------------------------------

OPERATION, DONE = b".", b"!"


def serve() -> None:
    """Fork a training for every line of standard input; an empty line waits for its end.

    Standard output gets the id of every training, then the output of the training, then its exit code.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(_child(**request))
        os.write(1, b"%d\n" % pid)
        # Not reaped before the test has requested it, so that the id to kill is not reused.
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        os.write(1, b"\n%d\n" % os.waitstatus_to_exitcode(status))


def _child(folder: str, tell: bool, die_at: int | None, options: Mapping[str, Any]) -> int:
    try:
        if tell:
            _watch(Path(folder), lambda name: os.write(1, OPERATION) if "/.tmp-" in name else None)
        elif die_at is not None:
            _watch(Path(folder), _Executioner(die_at))
        train(Path(folder), **options)
        os.write(1, DONE)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class _Executioner:
    """Kills its own process just before the n-th operation."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


def _watch(folder: Path, act: Callable[[str], Any]) -> None:
    """Call `act` before every operation that changes a file or a directory in `folder`."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _CHANGES and not (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        names = [os.fspath(name) for name in arguments[:2] if isinstance(name, (str, os.PathLike))]
        if names[0].startswith(str(folder)):
            act(" ".join(names))

    sys.addaudithook(hook)


if __name__ == "__main__":
    serve()
