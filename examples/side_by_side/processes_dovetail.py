"""Train in two processes, with Dovetail."""

from shared import digits, network

from dovetail import Epochs, Trainer
from dovetail.trainers import DDPTrainer

x, y, x_valid, y_valid = digits()
trainer = DDPTrainer(Trainer(network(), learning_rate=1e-2, batch_size=16), num_processes=2)
history = trainer.fit((x, y), (x_valid, y_valid), max_length=Epochs(10))
accuracy = history.get_latest_metric("valid_accuracy")
print(f"result: validation accuracy {accuracy:.1%}")
assert accuracy > 0.9
