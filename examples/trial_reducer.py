"""Metrics that are not a mean over batches: the F1 score of a whole validation, over all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dovetail import pytorch
from dovetail.data import digits


class F1(pytorch.MetricReducer):
    """F1 score, computed from counts per class that are summed over batches and processes."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        self.counts = torch.zeros(3, self.num_classes, dtype=torch.int64)

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        hits = predicted[predicted == labels]
        for row, values in enumerate((hits, predicted, labels)):
            self.counts[row] += torch.bincount(values.cpu(), minlength=self.num_classes)

    def per_slot_reduce(self) -> Tensor:
        return self.counts

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> dict[str, float]:
        hits, predicted, labels = torch.stack(per_slot_metrics).sum(dim=0).double()
        scores = 2 * hits / (predicted + labels).clamp(min=1)
        return {"f1": float(scores.mean()), "f1_worst": float(scores.min())}


class F1Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=3e-3))
        self.f1 = context.wrap_reducer(F1(10), for_training=False)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(digits()[0], batch_size=32, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(digits()[1], batch_size=100)

    def train_batch(self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int) -> Tensor:
        # This step does not optimise, so the loop does it.
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def evaluate_batch(self, batch: pytorch.TorchData) -> dict[str, Any]:
        images, labels = batch
        scores = self.model(images)
        self.f1.update(scores.argmax(dim=1), labels)
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        return {"loss": losses.mean(), "worst_loss": losses.max(), "mistakes": (scores.argmax(dim=1) != labels).sum()}

    def evaluation_reducer(self) -> dict[str, pytorch.Reducer]:
        return {"worst_loss": pytorch.Reducer.MAX, "mistakes": pytorch.Reducer.SUM}


if __name__ == "__main__":
    context = pytorch.init(hparams={}, checkpoint_dir=None)
    trial = context.build_trial(F1Trial)
    metrics = context.fit(trial, max_length=pytorch.Epoch(8), validation_period=pytorch.Epoch(4))
    f1, worst, mistakes = (metrics[name] for name in ("f1", "f1_worst", "mistakes"))
    print(f"result: F1 {f1:.3f}, of the worst class {worst:.3f}, {mistakes:.0f} mistakes")
