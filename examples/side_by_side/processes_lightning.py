"""Train in two processes, with Lightning."""

import lightning as L
import torch
from shared import digits, network
from torch.nn.functional import cross_entropy
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
        accuracy = (self.network(x).argmax(dim=1) == y).float().mean()
        self.log("valid_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


x, y, x_valid, y_valid = map(torch.from_numpy, digits())
train = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
valid = DataLoader(TensorDataset(x_valid, y_valid), batch_size=16)
trainer = L.Trainer(max_epochs=10, accelerator="cpu", devices=2)
trainer.fit(Classifier(), train, valid)
accuracy = trainer.callback_metrics["valid_accuracy"].item()
print(f"result: validation accuracy {accuracy:.1%}")
assert accuracy > 0.9
