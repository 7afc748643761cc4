"""Training in processes that Dovetail starts: `python launched_training.py FOLDER [holds]`.

Both workers write their numbers to a file of the folder, and then wait inside of their second batch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail import Epochs
from dovetail.callbacks import Callback
from dovetail.trainers import DDPTrainer, Trainer

INPUTS = torch.linspace(-1, 1, 48).reshape(12, 4)
DATA = INPUTS, (INPUTS.sum(dim=1) > 0).long()


class Whereabouts(nn.Module):
    """Answers every sample with the process that computes it, its parent, and the scale in its environment."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        found = [os.getpid(), os.getppid(), float(os.environ.get("SCALE", "1")), len(os.getcwd())]
        answers = torch.tensor(found, dtype=torch.float64).expand(len(inputs), 4)
        return answers * self.scale


class Waits(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, context: Any, output: Any) -> None:
        """Report the worker and the process that it was forked from, and wait."""
        if context.progress.batches == 1:
            target = self.folder / f"worker-{context.process.share.rank}"
            target.with_suffix(".part").write_text(f"{os.getpid()} {os.getppid()}", encoding="ascii")
            target.with_suffix(".part").rename(target)
            while True:
                signal.pause()


def make_trainer(model: nn.Module | None = None, *callbacks: Callback, **layer: Any) -> Any:
    torch.manual_seed(0)
    trainer = Trainer(model or nn.Linear(4, 2), "cpu", batch_size=2, seed=3, callbacks=list(callbacks), verbose=False)
    return DDPTrainer(trainer, num_processes=2, **layer)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer = make_trainer(None, Waits(folder))
    if "holds" in sys.argv:
        trainer.evaluate(DATA)
        if os.fork() == 0:
            # Another child of the caller, which has inherited its sockets and outlives it.
            (folder / "child").write_text(str(os.getpid()), encoding="ascii")
            while True:
                signal.pause()
    trainer.fit(DATA, max_length=Epochs(1))
