"""Warm up, then follow a cosine to zero, with Lightning."""

import lightning as L
import torch
from shared import digits, network
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.network(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_accuracy", (self.network(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        warmup = steps // 10
        rise = LinearLR(optimizer, start_factor=1e-3, total_iters=warmup)
        fall = CosineAnnealingLR(optimizer, T_max=steps - warmup)
        scheduler = SequentialLR(optimizer, [rise, fall], milestones=[warmup])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


x, y, x_valid, y_valid = map(torch.from_numpy, digits())
train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
valid = DataLoader(TensorDataset(x_valid, y_valid), batch_size=32)
trainer = L.Trainer(max_epochs=10)
trainer.fit(Classifier(), train, valid)
accuracy = trainer.callback_metrics["valid_accuracy"].item()
rate = trainer.optimizers[0].param_groups[0]["lr"]
print(f"result: validation accuracy {accuracy:.1%}, last learning rate {rate:.0e}")
assert accuracy > 0.9
assert rate < 1e-4
