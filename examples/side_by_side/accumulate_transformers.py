"""Accumulate gradients of padded batches: every token counts once, with transformers."""

from shared import difference_to_large_batches, documents, llama, pad
from transformers import Trainer, TrainingArguments

args = TrainingArguments(
    num_train_epochs=3,
    optim="sgd",
    learning_rate=0.1,
    lr_scheduler_type="constant",
    max_grad_norm=0,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    train_sampling_strategy="sequential",
    remove_unused_columns=False,
)
trainer = Trainer(llama(), args, data_collator=pad, train_dataset=documents())
trainer.train()
difference = difference_to_large_batches(trainer.model)
print(f"result: weights differ by {difference:.0e} from those of large batches")
assert difference < 1e-5
