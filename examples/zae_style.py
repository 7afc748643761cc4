"""A trainer in zae-engine's style: define `train_step` and `test_step`, run some epochs, run some more, and infer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from dovetail.compat.zae_engine import Trainer
from dovetail.data import DataLoader, digits


class CustomTrainer(Trainer):
    def train_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        outputs = self.model(x)
        loss = self.criterion(outputs, y)
        return {"loss": loss}

    def test_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        outputs = self.model(x)
        loss = self.criterion(outputs, y)
        return {"loss": loss, "output": outputs, "correct": outputs.argmax(dim=1) == y}

    def metric_on_epoch_end(self) -> dict[str, float]:
        if self.mode == "train":
            return {}
        return {"accuracy": torch.cat(self.log_test["correct"]).float().mean().item()}


def main() -> None:
    torch.manual_seed(0)
    train, valid, test = digits()
    loader = DataLoader(train, batch_size=32, shuffle=True)
    valid_loader, test_loader = DataLoader(valid, batch_size=128), DataLoader(test, batch_size=128)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = Adam(model.parameters(), lr=3e-3)
    scheduler = StepLR(optimizer, step_size=5, gamma=0.5)
    trainer = CustomTrainer(
        model,
        "cpu",
        mode="train",
        optimizer=optimizer,
        scheduler=scheduler,
        criterion=nn.CrossEntropyLoss(),
        gradient_clip=5.0,
    )
    trainer.run(5, loader, valid_loader)
    trainer.run(10, loader, valid_loader)
    print(f"accuracy {trainer.test_metrics['accuracy']:.1%} after {trainer.progress_checker.get_epoch() - 1} epochs")

    trainer.apply_weights()
    outputs = torch.cat(trainer.inference(test_loader))
    accuracy = (outputs.argmax(dim=1) == test.tensors[1]).float().mean().item()
    print(
        f"result: test accuracy {accuracy:.1%} with the weights of the best validation loss, {trainer.loss_buffer:.3f}"
    )
    assert accuracy > 0.93


if __name__ == "__main__":
    main()
