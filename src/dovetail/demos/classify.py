"""Demo `dovetail demo classify`: a classifier of handwritten digits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dovetail.callbacks import EarlyStopping
from dovetail.data import digits
from dovetail.data.models import cnn
from dovetail.demos.catalogue import Outcome
from dovetail.demos.pictures import BLUE, GREEN, GREY, ORANGE, picture
from dovetail.history import History
from dovetail.history.drawing import INK, tidy
from dovetail.trainers import Trainer
from dovetail.units import counted

_SHOWN = 12


def run(folder: Path, *, num_epochs: int = 40) -> Outcome:
    """Train, test, and draw the learning curves and some test images with their predictions."""
    train, valid, test = digits()
    print(f"images of 8×8 pixels: {len(train)} for training, {len(valid)} for validation, {len(test)} for testing")
    trainer = Trainer(
        lambda: cnn(channels=1, size=8, classes=10),
        optimizer=partial(AdamW, lr=5e-3),
        scheduler=partial(ReduceLROnPlateau, factor=0.3, patience=2),
        # Longer than the patience of the schedule, so that a smaller learning rate gets a chance first.
        callbacks=[EarlyStopping("valid_loss", patience=8, restore_best=True)],
        num_epochs=num_epochs,
        checkpoint_dir=folder / "run",
        keep_last=1,
        seed=0,
    )
    history = trainer.fit(train, valid)
    accuracy = trainer.evaluate(test)["accuracy"]
    images, labels = test.tensors
    scores = torch.as_tensor(trainer.predict(images)).softmax(dim=1).cpu()
    picture(folder / "digits.png", (10, 5.6), partial(_draw, history, images, labels, scores))
    return Outcome(
        f"test accuracy {accuracy:.1%} after {counted(trainer.context.progress.epoch, 'epoch')}",
        {
            "digits.png": "the learning curves, and test images with their predictions",
            "run": "the newest and the best checkpoint, and the history",
        },
    )


def _draw(history: History, images: Tensor, labels: Tensor, scores: Tensor, figure: Any) -> None:
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.3, 1])
    best = history.best("valid_loss")
    panels = {"loss": ("train", "valid"), "accuracy": ("valid",)}  # training records only the loss
    for axes, (metric, stages) in zip(upper.subplots(1, 2), panels.items(), strict=True):
        for stage in stages:
            values = history.get_metric_values(f"{stage}_{metric}")
            colour = {"train": BLUE, "valid": ORANGE}[stage]
            axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=1.8, label=stage)
        if best is not None:
            axes.axvline(best["epoch"], color=GREY, linewidth=1, linestyle="--", label="lowest validation loss")
        tidy(axes, metric if len(stages) > 1 else f"{metric} on the validation data", x="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
    upper.axes[0].legend(frameon=False, fontsize=9, labelcolor=INK)
    # The loss falls by orders of magnitude; the accuracy does not.
    upper.axes[0].set_yscale("log")

    # Sorted by the probability of the right answer, so that mistakes are first.
    hardest = scores.gather(1, labels.unsqueeze(1)).squeeze(1).argsort()[: _SHOWN // 2].tolist()
    others = [index for index in range(len(labels)) if index not in hardest][: _SHOWN // 2]
    lower.suptitle("test images and predictions of the model: the six hardest, and six others", **_HEADING)
    for axes, index in zip(lower.subplots(1, _SHOWN), hardest + others, strict=True):
        axes.imshow(images[index, 0].numpy(), cmap="gray_r")
        axes.set_axis_off()
        said, right = int(scores[index].argmax()), int(labels[index])
        is_right = said == right
        text = f"{said}" if is_right else f"{said} (is {right})"
        axes.set_title(f"{text}\n{scores[index].max():.0%}", color=GREEN if is_right else ORANGE, fontsize=10)


_HEADING = {"x": 0.01, "ha": "left", "fontsize": 11, "fontweight": "bold", "color": INK}
