"""Resume after a kill -9, with random noise in the data, with Dovetail."""

from shared import NoisyDigits, difference_after_kill, network

from dovetail import Epochs, Trainer


def train(folder):
    trainer = Trainer(network(), learning_rate=1e-2, batch_size=32, checkpoint_dir=folder, seed=0)
    trainer.fit(NoisyDigits(), max_length=Epochs(5), resume="auto")
    return trainer.model


difference = difference_after_kill(train)
print(f"result: weights differ by {difference:.0e} from those of a run without a kill")
assert difference == 0
