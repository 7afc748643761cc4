"""Accumulate gradients of padded batches: every token counts once, with Lightning.

`accumulate_grad_batches` averages the means of the batches, so the steps are written by hand.
"""

import lightning as L
import torch
from shared import difference_to_large_batches, documents, llama, pad
from torch.utils.data import DataLoader


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = llama()
        self.automatic_optimization = False
        self.num_tokens = 0

    def training_step(self, batch, batch_idx):
        num_tokens = (batch["labels"][:, 1:] != -100).sum()
        self.manual_backward(self.model(**batch).loss * num_tokens)
        self.num_tokens += num_tokens
        if (batch_idx + 1) % 4 == 0 or self.trainer.is_last_batch:
            for parameter in self.parameters():
                parameter.grad /= self.num_tokens
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            self.num_tokens = 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


model = LanguageModel()
train = DataLoader(documents(), batch_size=2, collate_fn=pad)
L.Trainer(max_epochs=3).fit(model, train)
difference = difference_to_large_batches(model.model)
print(f"result: weights differ by {difference:.0e} from those of large batches")
assert difference < 1e-5
