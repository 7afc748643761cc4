"""Warm up, then follow a cosine to zero, with Keras.

`CosineDecay` needs the number of steps, which this program computes.
"""

import math

import keras
from shared import digits, keras_network

x, y, x_valid, y_valid = digits()
model = keras_network()
steps = 10 * math.ceil(len(x) / 32)
warmup = steps // 10
schedule = keras.optimizers.schedules.CosineDecay(
    0.0, steps - warmup, warmup_target=1e-2, warmup_steps=warmup
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(schedule), loss, metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=10, validation_data=(x_valid, y_valid))
accuracy = history.history["val_accuracy"][-1]
rate = float(model.optimizer.learning_rate)
print(f"result: validation accuracy {accuracy:.1%}, last learning rate {rate:.0e}")
assert accuracy > 0.9
assert rate < 1e-4
