"""Fine-tune a transformers model on samples of unequal length, with transformers."""

from shared import bert, reviews
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments


def compute_metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean()}


tokenizer, train, valid = reviews()
args = TrainingArguments(
    num_train_epochs=10,
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    per_device_train_batch_size=16,
    eval_strategy="epoch",
)
trainer = Trainer(
    bert(),
    args,
    data_collator=DataCollatorWithPadding(tokenizer),
    train_dataset=train,
    eval_dataset=valid,
    compute_metrics=compute_metrics,
)
trainer.train()
accuracy = trainer.evaluate()["eval_accuracy"]
print(f"result: validation accuracy {accuracy:.1%}")
assert accuracy > 0.9
