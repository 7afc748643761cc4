"""Train a GAN: two optimizers that alternate, with Dovetail."""

import torch
from shared import GAN, distance_to_ring, ring
from torch.nn.functional import softplus

from dovetail import Epochs, Trainer


class GANTrainer(Trainer):
    def get_optimizer(self, model):
        return [
            torch.optim.Adam(model.discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
            torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        ]

    def train_step(self, batch):
        (real,), model, context = batch, self.model, self.context
        fake = model.generator(torch.randn(len(real), 2))
        d_loss = softplus(-model.discriminator(real)).mean()
        d_loss = d_loss + softplus(model.discriminator(fake.detach())).mean()
        context.backward(d_loss)
        context.step(context.optimizers[0])
        g_loss = softplus(-model.discriminator(fake)).mean()
        context.backward(g_loss, inputs=list(model.generator.parameters()))
        context.step(context.optimizers[1])
        return {"loss": g_loss, "d_loss": d_loss}


trainer = GANTrainer(GAN(), batch_size=64)
trainer.fit(ring(), max_length=Epochs(20))
distance = distance_to_ring(trainer.model.generator(torch.randn(1000, 2)).detach())
print(f"result: distance {distance:.3f} to the circle")
assert distance < 0.4
