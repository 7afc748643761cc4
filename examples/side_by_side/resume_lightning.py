"""Resume after a kill -9, with random noise in the data, with Lightning.

A checkpoint of Lightning has no random state; a callback adds it.
"""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from shared import NoisyDigits, difference_after_kill, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class RandomState(L.Callback):
    def state_dict(self):
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state_dict):
        torch.set_rng_state(state_dict["torch"])


def train(folder):
    L.seed_everything(0)
    model = Classifier()
    loader = DataLoader(NoisyDigits(), batch_size=32, shuffle=True)
    checkpoint = ModelCheckpoint(folder, save_last=True)
    trainer = L.Trainer(max_epochs=5, callbacks=[checkpoint, RandomState()])
    trainer.fit(model, loader, ckpt_path="last")
    return model


difference = difference_after_kill(train)
print(f"result: weights differ by {difference:.0e} from those of a run without a kill")
assert difference == 0
