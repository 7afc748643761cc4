"""Measure macro F1 and AUROC over the whole validation set, with Keras.

Both metrics need one-hot labels, and `AUC` is an approximation with 200 thresholds.
"""

import keras
from shared import digits, keras_network

x, y, x_valid, y_valid = digits()
y, y_valid = keras.utils.to_categorical(y), keras.utils.to_categorical(y_valid)
model = keras.Sequential([keras_network(), keras.layers.Softmax()])
f1 = keras.metrics.F1Score(average="macro", name="f1")
auroc = keras.metrics.AUC(multi_label=True, num_labels=10, name="auroc")
model.compile(keras.optimizers.Adam(1e-2), "categorical_crossentropy", metrics=[f1, auroc])
history = model.fit(x, y, batch_size=32, epochs=10, validation_data=(x_valid, y_valid))
f1, auroc = (history.history[f"val_{name}"][-1] for name in ("f1", "auroc"))
print(f"result: F1 {f1:.3f}, AUROC {auroc:.4f}")
assert f1 > 0.9
assert auroc > 0.99
