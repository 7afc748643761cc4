"""Train a small convolutional network on scikit-learn's handwritten digits. This is what `make demo` runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn
from torch.optim import AdamW

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
    train, valid, test = digits()
    print(f"{len(train)} images of 8×8 pixels to learn from, {len(valid)} to validate, {len(test)} to test\n")

    trainer = Trainer(
        network,
        optimizer=partial(AdamW, lr=3e-3),
        callbacks=[EarlyStopping("valid_loss", patience=5, restore_best=True)],
        num_epochs=40,
        checkpoint_dir=RUN,
        keep_last=1,
        seed=0,
    )
    history = trainer.fit(train, valid)
    history.plot(RUN / "curves.png")
    accuracy = trainer.evaluate(test)["accuracy"]

    print(f"\ncurves       {RUN / 'curves.png'}")
    print(f"checkpoints  {RUN}; look at them with: dovetail checkpoint list {RUN}")
    print("             train on from the newest one with: trainer.fit(train, valid, resume='auto')")
    print(f"\ntest accuracy {accuracy:.1%} after {trainer.cur_epoch} epochs")
    assert accuracy >= 0.97, "the network has not learned what it should"


if __name__ == "__main__":
    main()
