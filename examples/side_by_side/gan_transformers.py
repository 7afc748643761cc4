"""Train a GAN: two optimizers that alternate, with transformers.

The trainer has one optimizer, the generator's; checkpoints do not have the discriminator's.
"""

import torch
from shared import GAN, distance_to_ring, ring
from torch.nn.functional import softplus
from transformers import Trainer, TrainingArguments


class GANTrainer(Trainer):
    def create_optimizer(self, model=None):
        gan = self.model
        self.d_optimizer = torch.optim.Adam(gan.discriminator.parameters(), 1e-2, (0.5, 0.999))
        self.optimizer = torch.optim.Adam(gan.generator.parameters(), 1e-3, (0.5, 0.999))
        return self.optimizer

    def training_step(self, model, inputs, num_items_in_batch=None):
        real = self._prepare_inputs(inputs)["real"]
        fake = model.generator(torch.randn(len(real), 2))
        d_loss = softplus(-model.discriminator(real)).mean()
        d_loss = d_loss + softplus(model.discriminator(fake.detach())).mean()
        self.d_optimizer.zero_grad()
        self.accelerator.backward(d_loss)
        self.d_optimizer.step()
        g_loss = softplus(-model.discriminator(fake)).mean()
        self.accelerator.backward(g_loss)
        return g_loss.detach()


args = TrainingArguments(
    num_train_epochs=20,
    lr_scheduler_type="constant",
    per_device_train_batch_size=64,
    max_grad_norm=0,
    remove_unused_columns=False,
)
trainer = GANTrainer(GAN(), args, train_dataset=[{"real": point} for point in ring()])
trainer.train()
distance = distance_to_ring(trainer.model.generator(torch.randn(1000, 2)).detach())
print(f"result: distance {distance:.3f} to the circle")
assert distance < 0.4
