"""Resume after a kill -9, with random noise in the data, with transformers."""

from shared import NoisyDigits, difference_after_kill, network
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, labels=None):
        logits = self.network(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def collate(samples):
    x, labels = default_collate(samples)
    return {"x": x, "labels": labels}


def train(folder):
    args = TrainingArguments(
        folder,
        num_train_epochs=5,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        save_strategy="epoch",
        remove_unused_columns=False,
    )
    trainer = Trainer(Classifier(), args, data_collator=collate, train_dataset=NoisyDigits())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer.model


difference = difference_after_kill(train)
print(f"result: weights differ by {difference:.0e} from those of a run without a kill")
assert difference == 0
