"""Resume after a kill -9, with random noise in the data, with Keras.

A backup of Keras has no random state; a callback seeds every epoch with its number.
"""

import keras
from shared import NoisyDigits, difference_after_kill, keras_network
from torch.utils.data import DataLoader


class SeedEpochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        keras.utils.set_random_seed(epoch)


def train(folder):
    model = keras_network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    loader = DataLoader(NoisyDigits(), batch_size=32, shuffle=True)
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    model.fit(loader, epochs=5, callbacks=[backup, SeedEpochs()])
    return model


difference = difference_after_kill(train)
print(f"result: weights differ by {difference:.0e} from those of a run without a kill")
assert difference == 0
