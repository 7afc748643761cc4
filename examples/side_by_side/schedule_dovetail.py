"""Warm up, then follow a cosine to zero, with Dovetail."""

from shared import digits, network

from dovetail import Epochs, Trainer

x, y, x_valid, y_valid = digits()
trainer = Trainer(network(), learning_rate=1e-2, lr_scheduler="cosine", warmup=0.1, batch_size=32)
history = trainer.fit((x, y), (x_valid, y_valid), max_length=Epochs(10))
accuracy = history.get_latest_metric("valid_accuracy")
rate = trainer.optimizer.param_groups[0]["lr"]
print(f"result: validation accuracy {accuracy:.1%}, last learning rate {rate:.0e}")
assert accuracy > 0.9
assert rate < 1e-4
