"""A variational autoencoder: `train_step` computes a loss with two terms, and the decoder draws new digits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from dovetail.data import digits
from dovetail.trainers import Trainer


class VAE(nn.Module):
    def __init__(self, num_latent: int = 8) -> None:
        super().__init__()
        self.num_latent = num_latent
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2 * num_latent))
        self.decoder = nn.Sequential(
            nn.Linear(num_latent, 256), nn.ReLU(), nn.Linear(256, 64), nn.Unflatten(1, (1, 8, 8))
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(latent), mean, log_variance

    def sample(self, number: int) -> Tensor:
        device = next(self.parameters()).device
        with torch.inference_mode():
            return self.decoder(torch.randn(number, self.num_latent, device=device)).sigmoid()


class VAETrainer(Trainer):
    def train_step(self, batch: Any) -> dict[str, Tensor]:
        (images,) = batch
        logits, mean, log_variance = self.model(images)
        bce = cross_entropy(logits, images, reduction="sum") / len(images)
        kld = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum() / len(images)
        return {"loss": bce + kld, "bce": bce, "kld": kld}

    test_step = train_step


def draw(images: Tensor) -> str:
    """Return images side by side, as text."""
    rows = (images * 9).long().squeeze(1).permute(1, 0, 2).tolist()
    return "\n".join("   ".join("".join(2 * " .:-=+*#%@"[shade] for shade in image) for image in row) for row in rows)


def main() -> None:
    train, test = (part.tensors[0] for part in digits(split=(0.8, 0.2)))  # the images, without their labels
    trainer = VAETrainer(VAE, learning_rate=2e-3, num_epochs=40, seed=0)
    trainer.fit(train, test)

    # The loss of a model with useless latent variables: it can only predict the average image.
    average = train.mean(dim=0).clamp(1e-3, 1 - 1e-3).logit().expand_as(test)
    known_average = cross_entropy(average, test, reduction="sum").item() / len(test)
    loss = trainer.evaluate(test)["loss"]
    print(f"\n{draw(trainer.model.sample(6))}\n")
    print(f"result: {loss:.1f} nats per image, where the average image costs {known_average:.1f}")
    assert loss < known_average - 2


if __name__ == "__main__":
    main()
