"""A convolutional network for handwritten digits, as a trial: the data, the model and two hyperparameters in one class.

The same file runs alone, with `python -m dovetail.launch --slots 2`, and with `torchrun`.
"""

from __future__ import annotations

import torch
from torch import nn

from dovetail import pytorch
from dovetail.data import digits


class DigitsTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.train_set, self.test_set, _ = digits()
        filters = context.get_hparam("filters")
        self.model = context.wrap_model(
            nn.Sequential(
                nn.Conv2d(1, filters, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(filters, 2 * filters, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(0.25),
                nn.Flatten(),
                nn.Linear(32 * filters, 10),
            )
        )
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=context.get_hparam("learning_rate"))
        )
        self.schedule = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8),
            pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.train_set, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.test_set, batch_size=256)

    def train_batch(self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0)
        )
        return {"loss": loss}

    def evaluate_batch(self, batch: pytorch.TorchData) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = self.model(images)
        return {
            "loss": nn.functional.cross_entropy(scores, labels),
            "accuracy": (scores.argmax(dim=1) == labels).double().mean(),
        }


if __name__ == "__main__":
    hparams = {"filters": 16, "learning_rate": 5e-3, "global_batch_size": 64}
    with pytorch.init(hparams=hparams, checkpoint_dir="runs", seed=1) as context:
        trial = DigitsTrial(context)
        trainer = pytorch.Trainer(trial, context)
        metrics = trainer.fit(
            max_length=pytorch.Epoch(6), validation_period=pytorch.Epoch(1), checkpoint_period=pytorch.Epoch(2)
        )
        if context.distributed.is_chief:
            print(f"result: accuracy {metrics['accuracy']:.3f}")
