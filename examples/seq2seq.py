"""Sequence to sequence with teacher forcing: a GRU reads a word of digits and writes it backwards.

The loss is a mean over tokens, and words differ in length. The step returns the number of tokens as `num_items`, so
that accumulated batches give exactly the gradient of one large batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR

from dovetail.trainers import Trainer

PAD, START = 0, 11  # the digits are 1..10


def words(number: int, seed: int, longest: int = 5) -> tuple[Tensor, Tensor]:
    """Return random words of 2 to `longest` digits, padded, and the same words backwards."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (number,), generator=generator).tolist()
    made = [torch.randint(1, 11, (length,), generator=generator) for length in lengths]
    return pad_sequence(made, batch_first=True), pad_sequence([word.flip(0) for word in made], batch_first=True)


class Seq2Seq(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 32, padding_idx=PAD)
        self.encoder = nn.GRU(32, width, batch_first=True)
        self.decoder = nn.GRU(32, width, batch_first=True)
        self.output = nn.Linear(width, 11)

    def forward(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the logits of every token; with a target, the input of each token is the previous target token."""
        _, state = self.encoder(self.embedding(source))
        token = torch.full_like(source[:, :1], START)
        if target is not None:
            told = torch.cat([token, target[:, :-1]], dim=1)
            return self.output(self.decoder(self.embedding(told), state)[0])
        logits = []
        for _ in range(source.shape[1]):
            hidden, state = self.decoder(self.embedding(token), state)
            logits.append(self.output(hidden))
            token = logits[-1].argmax(dim=2)
        return torch.cat(logits, dim=1)


class Seq2SeqTrainer(Trainer):
    teacher_forcing = 0.8

    def train_step(self, batch: Any) -> dict[str, Any]:
        source, target = batch
        is_told = torch.rand(()) < self.teacher_forcing
        logits = self.model(source, target if is_told else None)
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)
        return {"loss": loss, "num_items": (target != PAD).sum()}

    def test_step(self, batch: Any) -> dict[str, Tensor]:
        source, target = batch
        written = self.model(source).argmax(dim=2)
        return {"exact_match": ((written == target) | (target == PAD)).all(dim=1).float().mean()}


def main() -> None:
    trainer = Seq2SeqTrainer(
        Seq2Seq,
        learning_rate=5e-3,
        lr_scheduler=partial(CosineAnnealingLR, T_max=8),
        gradient_clip=1.0,
        batch_size=32,
        accumulation_steps=2,
        num_epochs=8,
        seed=0,
    )
    trainer.fit(words(4000, seed=0), words(500, seed=1))

    exact = trainer.evaluate(words(1000, seed=2))["exact_match"]
    print(f"result: {exact:.1%} of new words are written backwards without a mistake")
    assert exact > 0.9


if __name__ == "__main__":
    main()
