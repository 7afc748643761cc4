"""Measure macro F1 and AUROC over the whole validation set, with transformers."""

from scipy.special import softmax
from shared import digits, network
from sklearn.metrics import f1_score, roc_auc_score
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
    scores, labels = softmax(prediction.predictions, axis=1), prediction.label_ids
    return {
        "f1": f1_score(labels, scores.argmax(axis=1), average="macro"),
        "auroc": roc_auc_score(labels, scores, multi_class="ovr"),
    }


x, y, x_valid, y_valid = digits()
args = TrainingArguments(
    num_train_epochs=10,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    per_device_train_batch_size=32,
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
metrics = trainer.evaluate()
f1, auroc = metrics["eval_f1"], metrics["eval_auroc"]
print(f"result: F1 {f1:.3f}, AUROC {auroc:.4f}")
assert f1 > 0.9
assert auroc > 0.99
