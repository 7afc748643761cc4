"""Train a GAN: two optimizers that alternate, with Lightning."""

import lightning as L
import torch
from shared import GAN, distance_to_ring, ring
from torch.nn.functional import softplus
from torch.utils.data import DataLoader


class AlternatingGAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GAN()
        self.automatic_optimization = False

    def training_step(self, real, batch_idx):
        model, (d_optimizer, g_optimizer) = self.model, self.optimizers()
        fake = model.generator(torch.randn(len(real), 2))
        d_loss = softplus(-model.discriminator(real)).mean()
        d_loss = d_loss + softplus(model.discriminator(fake.detach())).mean()
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        g_loss = softplus(-model.discriminator(fake)).mean()
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.log_dict({"loss": g_loss, "d_loss": d_loss})

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.model.discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
            torch.optim.Adam(self.model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        ]


gan = AlternatingGAN()
L.Trainer(max_epochs=20).fit(gan, DataLoader(torch.from_numpy(ring()), batch_size=64, shuffle=True))
distance = distance_to_ring(gan.model.generator(torch.randn(1000, 2)).detach())
print(f"result: distance {distance:.3f} to the circle")
assert distance < 0.4
