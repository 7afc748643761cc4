"""Train and validate a classifier from arrays, with Dovetail."""

from shared import digits, network

from dovetail import Epochs, Trainer

x, y, x_valid, y_valid = digits()
trainer = Trainer(network(), learning_rate=1e-2, batch_size=32)
history = trainer.fit((x, y), (x_valid, y_valid), max_length=Epochs(10))
accuracy = history.get_latest_metric("valid_accuracy")
print(f"result: validation accuracy {accuracy:.1%}")
assert accuracy > 0.9
