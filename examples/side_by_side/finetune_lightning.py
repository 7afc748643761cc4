"""Fine-tune a transformers model on samples of unequal length, with Lightning."""

import lightning as L
import torch
from shared import bert, reviews
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = bert()

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        logits = self.model(**batch).logits
        self.log("valid_accuracy", (logits.argmax(dim=1) == batch["labels"]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


tokenizer, train, valid = reviews()
collator = DataCollatorWithPadding(tokenizer)
train_loader = DataLoader(train, batch_size=16, shuffle=True, collate_fn=collator)
valid_loader = DataLoader(valid, batch_size=16, collate_fn=collator)
trainer = L.Trainer(max_epochs=10)
trainer.fit(Classifier(), train_loader, valid_loader)
accuracy = trainer.callback_metrics["valid_accuracy"].item()
print(f"result: validation accuracy {accuracy:.1%}")
assert accuracy > 0.9
