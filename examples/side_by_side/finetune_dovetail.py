"""Fine-tune a transformers model on samples of unequal length, with Dovetail."""

from shared import bert, reviews
from transformers import DataCollatorWithPadding

from dovetail import Epochs, Trainer

tokenizer, train, valid = reviews()
collator = DataCollatorWithPadding(tokenizer)
trainer = Trainer(bert(), collate_fn=collator, learning_rate=3e-3, batch_size=16)
history = trainer.fit(train, valid, max_length=Epochs(10))
accuracy = history.get_latest_metric("valid_accuracy")
print(f"result: validation accuracy {accuracy:.1%}")
assert accuracy > 0.9
