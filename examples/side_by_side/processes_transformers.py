"""Train in two processes, with transformers.

Run it with `torchrun --nproc-per-node 2`: the trainer starts no processes.
"""

from shared import digits, network
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, labels=None):
        logits = self.network(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def compute_metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean()}


x, y, x_valid, y_valid = digits()
args = TrainingArguments(
    num_train_epochs=10,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    per_device_train_batch_size=16,
    eval_strategy="epoch",
)
trainer = Trainer(
    Classifier(),
    args,
    train_dataset=[{"x": a, "labels": b} for a, b in zip(x, y, strict=True)],
    eval_dataset=[{"x": a, "labels": b} for a, b in zip(x_valid, y_valid, strict=True)],
    compute_metrics=compute_metrics,
)
trainer.train()
accuracy = trainer.evaluate()["eval_accuracy"]
print(f"result: validation accuracy {accuracy:.1%}")
assert accuracy > 0.9
