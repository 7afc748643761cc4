"""Stop early and load the best checkpoint, with Keras."""

import keras
from shared import digits, keras_network

x, y, x_valid, y_valid = digits()
model = keras_network()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-2), loss)
stop = keras.callbacks.EarlyStopping("val_loss", patience=3)
best = keras.callbacks.ModelCheckpoint("runs/best.keras", save_best_only=True)
history = model.fit(
    x, y, batch_size=32, epochs=100, validation_data=(x_valid, y_valid), callbacks=[stop, best]
)
model = keras.models.load_model("runs/best.keras")
loss = model.evaluate(x_valid, y_valid)
losses = history.history["val_loss"]
print(f"result: validation loss {loss:.3f}, the best of {len(losses)} epochs")
assert abs(loss - min(losses)) < 1e-6
assert len(losses) < 100
