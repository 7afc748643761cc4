"""Trials that the tests train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dovetail import pytorch
from dovetail.pytorch import PyTorchCallback, PyTorchTrialContext

NUM_TRAINED, NUM_VALIDATED = 44, 21


def make_data(number: int, seed: int = 7) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :3] + 0.3 * torch.randn(number, 3, generator=generator)).argmax(dim=1))


class Classifier(pytorch.PyTorchTrial):
    """A small classifier whose every part is set by hyperparameters."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        get = context.get_hparams().get
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(get("dropout", 0.0)), nn.Linear(8, 3)).double()
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.clip: Any = None
        self.seen: list[tuple[int, int, int]] = []
        self.callbacks: dict[str, PyTorchCallback] = {}

    def build_training_data_loader(self) -> Any:
        get = self.context.get_hparams().get
        return pytorch.DataLoader(
            make_data(NUM_TRAINED),
            get("batch_size", 8),
            shuffle=get("shuffle", True),
            drop_last=get("drop_last", False),
        )

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(make_data(NUM_VALIDATED, seed=8), self.context.get_hparams().get("batch_size", 8))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        self.seen.append((epoch_idx, batch_idx, len(x)))
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        scores = self.model(x)
        return {
            "loss": nn.functional.cross_entropy(scores, y),
            "accuracy": (scores.argmax(dim=1) == y).double().mean(),
        }

    def predict_batch(self, batch: Any) -> Tensor:
        predicted: Tensor = self.model(batch[0] if isinstance(batch, (list, tuple)) else batch)
        return predicted

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return self.callbacks


def make(
    folder: Path | str | None = None,
    trial_class: type[pytorch.PyTorchTrial] = Classifier,
    hparams: Mapping[str, Any] | None = None,
    change: Callable[[Any], None] = lambda trial: None,
    **settings: Any,
) -> tuple[Any, PyTorchTrialContext]:
    """Return a trial, changed as the test wants it, and the context to train it with."""
    context = pytorch.init(hparams=hparams or {}, checkpoint_dir=folder, verbose=False, **settings)
    trial: Any = context.build_trial(trial_class)
    change(trial)
    return trial, context
