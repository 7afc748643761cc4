"""A trainer in plato's style: override loss, optimizer and a hook, then call `train` and `test`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn, optim

from dovetail.data import digits
from dovetail.trainers import basic


class SmoothTrainer(basic.Trainer):
    def get_loss_criterion(self) -> nn.Module:
        return nn.CrossEntropyLoss(label_smoothing=0.1)

    def get_optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def get_lr_scheduler(self, config: Mapping[str, Any], optimizer: optim.Optimizer) -> Any:
        return optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config["epochs"])

    def train_step_end(self, config: Mapping[str, Any], batch: int | None = None, loss: Tensor | None = None) -> None:
        if batch == 0:
            print(f"[client {self.client_id}] epoch {self.current_epoch}: first loss {loss:.3f}")


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def main() -> None:
    trainset, testset = digits(split=(0.8, 0.2))
    trainer = SmoothTrainer(model=network, num_epochs=10, batch_size=32, seed=0, verbose=False)
    trainer.set_client_id(1)

    # A federated client trains on a part of the data; here it is every second image.
    seconds = trainer.train(trainset, sampler=range(0, len(trainset), 2))
    accuracy = trainer.test(testset)
    print(f"result: test accuracy {accuracy:.1%} after {seconds:.1f} s on half of the data")
    assert accuracy > 0.9


if __name__ == "__main__":
    main()
