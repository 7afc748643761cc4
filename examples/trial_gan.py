"""A GAN as a trial: two models with two optimizers, and a step of each after its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils.data import TensorDataset

from dovetail import pytorch
from dovetail.data import digits


class GANTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.train_set, self.valid_set, _ = (TensorDataset(part.tensors[0]) for part in digits())
        latent, width = context.get_hparam("latent"), context.get_hparam("width")
        self.generator = context.wrap_model(
            nn.Sequential(
                nn.Unflatten(1, (latent, 1, 1)),
                nn.ConvTranspose2d(latent, 4 * width, 2, bias=False),
                nn.BatchNorm2d(4 * width),
                nn.ReLU(),
                nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(2 * width),
                nn.ReLU(),
                nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1),
                nn.Sigmoid(),
            )
        )
        self.discriminator = context.wrap_model(
            nn.Sequential(
                nn.Conv2d(1, 2 * width, 4, stride=2, padding=1),
                nn.LeakyReLU(0.2),
                nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1),
                nn.LeakyReLU(0.2),
                nn.Flatten(),
                nn.Linear(16 * width, 1),
            )
        )
        rate, betas = context.get_hparam("learning_rate"), (0.5, 0.999)
        self.d_optimizer = context.wrap_optimizer(Adam(self.discriminator.parameters(), lr=rate, betas=betas))
        self.g_optimizer = context.wrap_optimizer(Adam(self.generator.parameters(), lr=rate, betas=betas))
        # The distance of samples to the nearest real image is not a mean over batches, so it needs a separate reducer.
        self.images = context.wrap_reducer(distance, name="distance", for_training=False)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.train_set, batch_size=48, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.valid_set, batch_size=128)

    def sample(self, number: int) -> Tensor:
        return self.generator(torch.randn(number, self.context.get_hparam("latent"), device=self.context.device))

    def train_batch(self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        (real,) = batch
        fake = self.sample(len(real))
        d_loss = softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake.detach())).mean()
        self.context.backward(d_loss)
        self.context.step_optimizer(self.d_optimizer)

        g_loss = softplus(-self.discriminator(fake)).mean()
        self.context.backward(g_loss)
        self.context.step_optimizer(self.g_optimizer)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def evaluate_batch(self, batch: pytorch.TorchData) -> dict[str, Tensor]:
        (real,) = batch
        fake = self.sample(len(real))
        self.images.update((real, fake))
        return {"d_loss": softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake)).mean()}


def distance(batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean distance to the nearest real image, averaged with the same distance in the other direction."""
    real, made = (torch.cat([batch[part] for batch in batches]).flatten(1) for part in (0, 1))
    between = torch.cdist(made, real)
    return (between.amin(dim=1).mean().item() + between.amin(dim=0).mean().item()) / 2


if __name__ == "__main__":
    hparams = {"latent": 16, "width": 12, "learning_rate": 2e-3}
    config = {"searcher": {"name": "single", "metric": "distance"}}
    context = pytorch.init(hparams=hparams, exp_conf=config, checkpoint_dir=None, seed=0)
    trial = context.build_trial(GANTrial)
    before = context.fit(trial, max_length=pytorch.Batch(1))
    after = context.fit(trial, max_length=pytorch.Epoch(16), validation_period=pytorch.Epoch(4))
    print(f"result: distance to digits {before['distance']:.2f} before and {after['distance']:.2f} after training")
    assert after["distance"] < 0.8 * before["distance"]
