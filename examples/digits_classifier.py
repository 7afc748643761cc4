"""Train a small convolutional network on scikit-learn's handwritten digits, with early stopping and checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dovetail.callbacks import EarlyStopping
from dovetail.data import digits
from dovetail.trainers import Trainer

RUN = Path("runs/digits")


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def network() -> nn.Module:
    return nn.Sequential(
        convolution(1, 16),
        convolution(16, 32),
        nn.MaxPool2d(2),
        convolution(32, 32),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 2 * 2, 10),
    )


def main() -> None:
    # A second thread does not speed up such a small network, and slows it down much if another program uses the core.
    torch.set_num_threads(1)
    train, valid, test = digits()
    print(f"{len(train)} images of 8×8 pixels to learn from, {len(valid)} to validate, {len(test)} to test\n")

    trainer = Trainer(
        network,
        optimizer=partial(AdamW, lr=3e-3),
        scheduler=partial(ReduceLROnPlateau, factor=0.3, patience=2),
        callbacks=[EarlyStopping("valid_loss", patience=8, restore_best=True)],
        num_epochs=40,
        checkpoint_dir=RUN,
        keep_last=1,
        seed=0,
    )
    history = trainer.fit(train, valid)
    history.plot(RUN / "curves.png")
    accuracy = trainer.evaluate(test)["accuracy"]

    print(f"""
learning curves: {RUN / "curves.png"}
checkpoints:     dovetail checkpoint list {RUN}
to resume:       trainer.fit(train, valid, resume="auto")

result: test accuracy {accuracy:.1%} after {trainer.context.progress.epoch} epochs""")
    assert accuracy >= 0.97


if __name__ == "__main__":
    main()
