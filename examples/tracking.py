"""Tracking of a run with one callback, several loggers, and a custom logger.

The loggers for TensorBoard, Weights & Biases, Neptune and MLflow are used in the same way, and need their packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from dovetail import Epochs
from dovetail.callbacks import Callback
from dovetail.data import digits
from dovetail.tracking import FolderLogger, Logger, Run, Status, Tracker, Value
from dovetail.trainers import Trainer
from dovetail.trainers.context import TrainingContext


class BestAccuracy(Logger):
    """A custom logger: the three methods `start`, `log` and `finish`."""

    def start(self, run: Run) -> None:
        self.best = 0.0
        print(f"run {run.id[:8]}: {run.hyperparameters['optimizer']}, lr {run.hyperparameters['optimizer.lr']}")

    def log(self, values: Mapping[str, Value], step: int) -> None:
        accuracy = values.get("valid_accuracy", 0.0)
        if isinstance(accuracy, float) and accuracy > self.best:
            self.best = accuracy
            print(f"  step {step}: valid_accuracy {accuracy:.1%}")

    def finish(self, status: Status) -> None:
        print(f"  {status}, best {self.best:.1%}")


class Norms(Callback):
    """A callback that logs its own numbers through the tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        assert context.model is not None
        squares = [parameter.detach().square().sum() for parameter in context.model.parameters()]
        self.tracker.log({"norms/weights": float(torch.stack(squares).sum().sqrt())})


def main(folder: Path) -> None:
    training, test = digits(split=(0.8, 0.2))
    files = FolderLogger(folder, label="digits")
    tracker = Tracker(
        files,
        BestAccuracy(),
        hyperparameters={"data": {"name": "digits", "api_key": "never shown"}},
        histograms_every=20,
    )
    trainer = Trainer(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        learning_rate=3e-3,
        callbacks=[tracker, Norms(tracker)],
        seed=0,
        verbose=False,
    )
    history = trainer.fit(training, test, max_length=Epochs(5))

    run = json.loads((files.path / "run.json").read_text())
    rows = [json.loads(line) for line in (files.path / "metrics.jsonl").read_text().splitlines()]
    histograms = [json.loads(line) for line in (files.path / "histograms.jsonl").read_text().splitlines()]
    print(f"in {files.path.name}: {', '.join(sorted(path.name for path in files.path.iterdir()))}")
    print("  names:", ", ".join(sorted({name for row in rows for name in row} - {"step"})))

    losses = [row["valid_loss"] for row in rows if "valid_loss" in row]
    assert losses == history.get_metric_values("valid_loss")
    assert (run["status"], run["hyperparameters"]["data.api_key"]) == ("finished", "***")
    print(f"result: {len(rows)} rows and {len(histograms)} sets of histograms, last valid_loss {losses[-1]:.3f}")


if __name__ == "__main__":
    with TemporaryDirectory() as runs:
        main(Path(runs))
