"""Train in mixed precision with bfloat16, with Keras."""

import keras
from shared import digits, keras_network

keras.config.set_dtype_policy("mixed_bfloat16")
x, y, x_valid, y_valid = digits()
model = keras_network()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=10, validation_data=(x_valid, y_valid))
accuracy = history.history["val_accuracy"][-1]
print(f"result: validation accuracy {accuracy:.1%}, {model.compute_dtype}")
assert accuracy > 0.9
