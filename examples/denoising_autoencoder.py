"""A denoising autoencoder: data without labels, and a `train_step` that adds noise to the input of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from dovetail.data import digits
from dovetail.trainers import Trainer


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 64),
        nn.Sigmoid(),
        nn.Unflatten(1, (1, 8, 8)),
    )


class DenoisingTrainer(Trainer):
    noise = 0.4

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        (clean,) = batch
        noisy = clean + self.noise * torch.randn_like(clean)
        return {"loss": mse_loss(self.model(noisy), clean), "noisy": mse_loss(noisy, clean)}

    test_step = train_step


def main() -> None:
    train, test = (part.tensors[0] for part in digits(split=(0.8, 0.2)))  # the images, without their labels
    trainer = DenoisingTrainer(autoencoder, optim_function="Adam", learning_rate=2e-3, num_epochs=40, seed=0)
    trainer.fit(train)

    errors = trainer.evaluate(test)
    factor = errors["noisy"] / errors["loss"]
    print(f"result: the noisy images are off by {errors['noisy']:.3f}, the cleaned ones {factor:.1f} times less")
    assert factor > 4


if __name__ == "__main__":
    main()
