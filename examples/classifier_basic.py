"""A classifier with keywords only: pass all settings to the constructor of the trainer, then call `train()`."""

from __future__ import annotations

import torch
from torch import nn

from dovetail.data import digits
from dovetail.trainers import Trainer
from dovetail.trainers.schedules import TriangularScheduler


def main() -> None:
    torch.manual_seed(0)
    train, valid, test = digits()
    trainer = Trainer(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        num_epochs=30,
        learning_rate=0.1,
        momentum=0.9,
        loss_function="CrossEntropyLoss",
        optim_function="SGD",
        lr_scheduler=TriangularScheduler(lr_min=0.01, lr_max=0.1, stepsize=100),
        batch_size=32,
        train_dataset=train,
        val_dataset=valid,
        test_dataset=test,
        early_stop={"num_epochs": 10, "improv": 0.001},
        checkpoint_dir="runs/classifier_basic",
        save_every=0,
        save_best=True,
    )
    trainer.train()
    best = max(trainer.history.get_metric_values("valid_accuracy"))
    trainer.load_model("runs/classifier_basic/best_ck")

    accuracy = trainer.evaluate()["accuracy"]
    print(f"result: test accuracy {accuracy:.1%}, best validation accuracy {best:.1%}")
    assert accuracy > 0.94


if __name__ == "__main__":
    main()
