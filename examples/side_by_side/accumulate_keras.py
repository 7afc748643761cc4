"""Accumulate gradients of padded batches: every token counts once, with Keras.

`gradient_accumulation_steps` averages the means of the batches, so the steps are written by hand.
"""

import keras
import torch
from shared import difference_to_large_batches, documents, llama, pad
from torch.utils.data import DataLoader


class LanguageModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.model = keras.layers.TorchModuleWrapper(llama())
        self.built, self.num_batches, self.num_tokens = True, 0, 0

    def train_step(self, batch):
        num_tokens = (batch["labels"][:, 1:] != -100).sum()
        loss = self.model(**batch).loss
        (loss * num_tokens).backward()
        self.num_tokens += num_tokens
        self.num_batches += 1
        if self.num_batches % 4 == 0:
            gradients = [weight.value.grad / self.num_tokens for weight in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            self.zero_grad()
            self.num_tokens = 0
        return {"loss": loss}


model = LanguageModel()
model.compile(keras.optimizers.SGD(0.1))
model.fit(DataLoader(documents(), batch_size=2, collate_fn=pad), epochs=3)
difference = difference_to_large_batches(model.model.module)
print(f"result: weights differ by {difference:.0e} from those of large batches")
assert difference < 1e-5
