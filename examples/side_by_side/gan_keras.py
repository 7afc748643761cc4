"""Train a GAN: two optimizers that alternate, with Keras."""

import keras
import torch
from shared import distance_to_ring, keras_gan, ring
from torch.nn.functional import softplus


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = keras_gan()
        self.built = True

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, real):
        fake = self.generator(torch.randn(len(real), 2))
        d_loss = softplus(-self.discriminator(real)).mean()
        d_loss = d_loss + softplus(self.discriminator(fake.detach())).mean()
        self.zero_grad()
        d_loss.backward()
        self.update(self.d_optimizer, self.discriminator.trainable_weights)
        g_loss = softplus(-self.discriminator(fake)).mean()
        self.zero_grad()
        g_loss.backward()
        self.update(self.g_optimizer, self.generator.trainable_weights)
        return {"loss": g_loss, "d_loss": d_loss}

    def update(self, optimizer, weights):
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)


gan = GAN()
gan.compile(keras.optimizers.Adam(1e-2, beta_1=0.5), keras.optimizers.Adam(1e-3, beta_1=0.5))
gan.fit(ring(), batch_size=64, epochs=20)
distance = distance_to_ring(gan.generator.predict(torch.randn(1000, 2)))
print(f"result: distance {distance:.3f} to the circle")
assert distance < 0.4
