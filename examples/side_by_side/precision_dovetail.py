"""Train in mixed precision with bfloat16, with Dovetail."""

from shared import digits, network

from dovetail import Epochs, Trainer
from dovetail.trainers import AMPTrainer

x, y, x_valid, y_valid = digits()
trainer = AMPTrainer(Trainer(network(), learning_rate=1e-2, batch_size=32), precision="bf16")
history = trainer.fit((x, y), (x_valid, y_valid), max_length=Epochs(10))
accuracy = history.get_latest_metric("valid_accuracy")
print(f"result: validation accuracy {accuracy:.1%}, {trainer.predict(x_valid).dtype}")
assert accuracy > 0.9
