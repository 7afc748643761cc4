"""Stop early and load the best checkpoint, with transformers."""

from shared import digits, network
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, labels=None):
        logits = self.network(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


x, y, x_valid, y_valid = digits()
args = TrainingArguments(
    num_train_epochs=100,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    per_device_train_batch_size=32,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
)
trainer = Trainer(
    Classifier(),
    args,
    train_dataset=[{"x": a, "labels": b} for a, b in zip(x, y, strict=True)],
    eval_dataset=[{"x": a, "labels": b} for a, b in zip(x_valid, y_valid, strict=True)],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
epochs = trainer.state.epoch
loss = trainer.evaluate()["eval_loss"]
print(f"result: validation loss {loss:.3f}, the best of {epochs:.0f} epochs")
assert abs(loss - trainer.state.best_metric) < 1e-6
assert epochs < 100
