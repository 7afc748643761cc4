"""Measure macro F1 and AUROC over the whole validation set, with Dovetail."""

from shared import digits, network

from dovetail import Epochs, Trainer

x, y, x_valid, y_valid = digits()
trainer = Trainer(network(), learning_rate=1e-2, batch_size=32, metrics=["f1", "auroc"])
history = trainer.fit((x, y), (x_valid, y_valid), max_length=Epochs(10))
f1, auroc = (history.get_latest_metric(f"valid_{name}") for name in ("f1", "auroc"))
print(f"result: F1 {f1:.3f}, AUROC {auroc:.4f}")
assert f1 > 0.9
assert auroc > 0.99
