"""Fine-tune a transformers model on samples of unequal length, with Keras.

`fit` takes a model of torch inside of a `TorchModuleWrapper`.
"""

import keras
from shared import bert, reviews
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding


class Classifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.model = keras.layers.TorchModuleWrapper(bert())

    def call(self, inputs):
        return self.model(**inputs).logits


def collate(samples):
    batch = collator(samples)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"]


tokenizer, train, valid = reviews()
collator = DataCollatorWithPadding(tokenizer)
train_loader = DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate)
valid_loader = DataLoader(valid, batch_size=16, collate_fn=collate)
model = Classifier()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
history = model.fit(train_loader, epochs=10, validation_data=valid_loader)
accuracy = history.history["val_accuracy"][-1]
print(f"result: validation accuracy {accuracy:.1%}")
assert accuracy > 0.9
