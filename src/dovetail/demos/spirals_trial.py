"""Trial of the demo: a perceptron for two spirals, with width, dropout and learning rate as hyperparameters.

`dovetail demo experiment` writes this file as `train.py` and searches its hyperparameters. To run it alone, use a
configuration with one value for each of them: `python -m dovetail.launch --config const.yaml train.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dovetail import Epochs, pytorch


def spirals(number: int, seed: int) -> TensorDataset:
    """Return points of two interleaved spirals, labelled with the number of their spiral."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(2, (number,), generator=generator)
    # The square root spreads the points evenly over the area of the disc.
    radius = torch.rand(number, generator=generator).sqrt()
    # One and a half turns, and the second arm on the opposite side.
    angle = 3 * math.pi * radius + math.pi * arm
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(number, 2, generator=generator), arm)


class SpiralsTrial(pytorch.PyTorchTrial):
    """A model, its optimizer, and the computation for a batch.

    Example:
        >>> hparams = {"width": 16, "dropout": 0.1, "learning_rate": 0.1}
        >>> trial = pytorch.init(hparams=hparams).build_trial(SpiralsTrial)
        >>> trial.model[0]
        Linear(in_features=2, out_features=16, bias=True)
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        width, dropout = context.get_hparam("width"), context.get_hparam("dropout")
        self.model = context.wrap_model(
            nn.Sequential(
                nn.Linear(2, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(width, 2),
            )
        )
        self.optimizer = context.wrap_optimizer(
            torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("learning_rate"))
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        """Make one training step and return the loss."""
        points, arms = batch
        loss = cross_entropy(self.model(points), arms)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Tensor]:
        """Return the accuracy of a batch."""
        points, arms = batch
        return {"accuracy": (self.model(points).argmax(dim=1) == arms).double().mean()}


if __name__ == "__main__":
    with pytorch.init() as context:
        context.fit(
            context.build_trial(SpiralsTrial),
            pytorch.DataLoader(spirals(2000, seed=0), batch_size=50, shuffle=True),
            pytorch.DataLoader(spirals(1000, seed=1), batch_size=500),
            validation_period=Epochs(1),
        )
