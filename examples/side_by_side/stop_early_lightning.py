"""Stop early and load the best checkpoint, with Lightning."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
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
        self.log("valid_loss", cross_entropy(self.network(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


x, y, x_valid, y_valid = map(torch.from_numpy, digits())
train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
valid = DataLoader(TensorDataset(x_valid, y_valid), batch_size=32)
stop = EarlyStopping("valid_loss", patience=3)
best = ModelCheckpoint("runs", monitor="valid_loss")
trainer = L.Trainer(max_epochs=100, callbacks=[stop, best])
trainer.fit(Classifier(), train, valid)
epochs = trainer.current_epoch
loss = trainer.validate(dataloaders=valid, ckpt_path="best")[0]["valid_loss"]
print(f"result: validation loss {loss:.3f}, the best of {epochs} epochs")
assert abs(loss - best.best_model_score) < 1e-6
assert epochs < 100
