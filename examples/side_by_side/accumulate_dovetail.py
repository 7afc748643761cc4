"""Accumulate gradients of padded batches: every token counts once, with Dovetail."""

from shared import difference_to_large_batches, documents, llama, pad
from torch.utils.data import DataLoader

from dovetail import Epochs, Trainer

train = DataLoader(documents(), batch_size=2, collate_fn=pad)
trainer = Trainer(
    llama(),
    optim_function="SGD",
    learning_rate=0.1,
    momentum=0,
    weight_decay=0,
    accumulation_steps=4,
)
trainer.fit(train, max_length=Epochs(3))
difference = difference_to_large_batches(trainer.model)
print(f"result: weights differ by {difference:.0e} from those of large batches")
assert difference < 1e-5
