"""Measure macro F1 and AUROC over the whole validation set, with Lightning."""

import lightning as L
import torch
from shared import digits, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()
        self.f1, self.auroc = MulticlassF1Score(num_classes=10), MulticlassAUROC(num_classes=10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.network(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        outputs = self.network(x)
        self.f1(outputs, y)
        self.auroc(outputs, y)
        self.log_dict({"valid_f1": self.f1, "valid_auroc": self.auroc})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


x, y, x_valid, y_valid = map(torch.from_numpy, digits())
train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
valid = DataLoader(TensorDataset(x_valid, y_valid), batch_size=32)
trainer = L.Trainer(max_epochs=10)
trainer.fit(Classifier(), train, valid)
f1, auroc = (trainer.callback_metrics[f"valid_{name}"].item() for name in ("f1", "auroc"))
print(f"result: F1 {f1:.3f}, AUROC {auroc:.4f}")
assert f1 > 0.9
assert auroc > 0.99
