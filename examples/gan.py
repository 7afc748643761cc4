"""A small DCGAN: `train_step` steps two optimizers through the context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam, Optimizer

from dovetail.data import digits
from dovetail.trainers import Trainer


class GAN(nn.Module):
    def __init__(self, num_latent: int = 16, width: int = 12) -> None:
        super().__init__()
        self.num_latent = num_latent
        self.generator = nn.Sequential(
            nn.Unflatten(1, (num_latent, 1, 1)),
            nn.ConvTranspose2d(num_latent, 4 * width, 2, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(16 * width, 1),
        )

    def sample(self, number: int) -> Tensor:
        device = next(self.parameters()).device
        return self.generator(torch.randn(number, self.num_latent, device=device))


class GANTrainer(Trainer):
    def get_optimizer(self, model: Any) -> list[Optimizer]:
        return [
            Adam(model.discriminator.parameters(), lr=4e-3, betas=(0.5, 0.999)),
            Adam(model.generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        ]

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        (real,) = batch
        context, generator, discriminator = self.context, self.model.generator, self.model.discriminator
        discriminator_optimizer, generator_optimizer = context.optimizers

        fake = self.model.sample(len(real))
        d_loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()
        context.backward(d_loss)
        context.step(discriminator_optimizer)

        g_loss = softplus(-discriminator(fake)).mean()
        context.backward(g_loss, inputs=list(generator.parameters()))
        context.step(generator_optimizer)
        return {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}


def main() -> None:
    train, test = (part.tensors[0] for part in digits(split=(0.8, 0.2)))  # the images, without their labels
    trainer = GANTrainer(GAN, batch_size=48, num_epochs=20, seed=0)
    trainer.fit(train)

    with torch.inference_mode():
        samples = trainer.model.eval().sample(len(train)).cpu()
    print(f"\n{draw(samples[:6])}\n")

    # Compare the samples with real images, and with noise: the training images, with the values of each pixel permuted
    # over the images. The noise has the mean and variance of real pixels, but no shapes.
    noise = torch.stack([pixel[torch.randperm(len(train))] for pixel in train.flatten(1).T], dim=1)
    distances = {
        name: distance(images, test) for name, images in [("real", train), ("made", samples), ("noise", noise)]
    }
    print("result: distance to unseen digits:", ", ".join(f"{name} {value:.2f}" for name, value in distances.items()))
    assert distances["made"] < 0.8 * distances["noise"]


def distance(made: Tensor, real: Tensor) -> float:
    """Return the mean distance to the nearest real image, averaged with the same distance in the other direction.

    The first part grows if samples do not look like digits, the second if the samples lack some digits.
    """
    between = torch.cdist(made.flatten(1), real.flatten(1))
    return (between.amin(dim=1).mean().item() + between.amin(dim=0).mean().item()) / 2


def draw(images: Tensor) -> str:
    """Return images side by side, as text."""
    rows = (images * 9).long().squeeze(1).permute(1, 0, 2).tolist()
    return "\n".join("   ".join("".join(2 * " .:-=+*#%@"[shade] for shade in image) for image in row) for row in rows)


if __name__ == "__main__":
    main()
