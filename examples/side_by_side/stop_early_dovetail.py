"""Stop early and load the best checkpoint, with Dovetail."""

from shared import digits, network

from dovetail import Epochs, Trainer
from dovetail.callbacks import EarlyStopping

x, y, x_valid, y_valid = digits()
trainer = Trainer(
    network(),
    learning_rate=1e-2,
    batch_size=32,
    callbacks=[EarlyStopping(patience=3)],
    checkpoint_dir="runs",
    best_metric="valid_loss",
)
history = trainer.fit((x, y), (x_valid, y_valid), max_length=Epochs(100))
trainer.load_model("runs/best_ck")
loss = trainer.evaluate((x_valid, y_valid))["loss"]
losses = history.get_metric_values("valid_loss")
print(f"result: validation loss {loss:.3f}, the best of {len(losses)} epochs")
assert abs(loss - min(losses)) < 1e-6
assert len(losses) < 100
