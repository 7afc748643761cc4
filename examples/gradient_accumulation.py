"""Exact gradient accumulation: micro-batches, even of unequal size, train the same model as large batches."""

from __future__ import annotations

import torch
from torch import nn

from dovetail.data import digits
from dovetail.trainers import Trainer


def train(batches: list[tuple[torch.Tensor, ...]], accumulation_steps: int) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double(),
        optim_function="SGD",
        learning_rate=0.1,
        momentum=0.9,
        accumulation_steps=accumulation_steps,
        num_epochs=10,
        verbose=False,
    )
    trainer.fit(batches)
    return trainer


def main() -> None:
    training, test = digits(split=(0.8, 0.2))
    images, labels = training.tensors
    data = images.double(), labels

    large = list(zip(*(part.split(64) for part in data), strict=True))
    # Divide each large batch into four: 10, 30, 4 and 20 samples. The last large batch, and so its window, is shorter.
    unequal = [micro for x, y in large for micro in zip(*(pieces(part) for part in (x, y)), strict=True)]
    print(f"batches of {[len(y) for _, y in large[:2]]} … {[len(y) for _, y in large[-1:]]}")
    print(f"  as micro-batches of {[len(y) for _, y in unequal[:8]]} … {[len(y) for _, y in unequal[-2:]]}")

    one, many = train(large, accumulation_steps=1), train(unequal, accumulation_steps=4)
    difference = max(
        (a - b).abs().max().item() for a, b in zip(one.model.parameters(), many.model.parameters(), strict=True)
    )
    accuracy = many.evaluate((test.tensors[0].double(), test.tensors[1]))["accuracy"]
    updates = many.context.progress.updates
    print(f"result: weights differ by {difference:.1e} after {updates} updates; test accuracy {accuracy:.1%}")
    assert difference < 1e-12
    assert accuracy > 0.9


def pieces(batch: torch.Tensor) -> list[torch.Tensor]:
    return [piece for piece in batch.tensor_split([10, 40, 44]) if len(piece)]


if __name__ == "__main__":
    main()
