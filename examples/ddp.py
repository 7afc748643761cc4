"""Data-parallel training from a plain script: the trainer starts two processes and returns their results.

No `if __name__ == "__main__"` is needed: the processes receive the trainer and its data, and never run this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dovetail.trainers import DDPTrainer, Trainer


class Spiral(nn.Module):
    """Points on three spiral arms; the target is the arm of a point."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 64), nn.Linear(64, 3)

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.out(self.hidden(points).relu())
        return scores


class SpiralTrainer(Trainer):
    def train_step(self, batch: Any) -> dict[str, Tensor]:
        points, arms = batch
        return {"loss": self.criterion(self.model(points), arms)}


def make_data(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    arms = torch.randint(3, (size,), generator=generator)
    radius = torch.rand(size, generator=generator, dtype=torch.float64)
    angle = 4 * radius + 2 * torch.pi / 3 * arms
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + 0.02 * torch.randn(size, 2, generator=generator, dtype=torch.float64), arms


def make_trainer(batch_size: int) -> SpiralTrainer:
    torch.manual_seed(0)
    return SpiralTrainer(
        Spiral().double(),
        "cpu",
        optim_function="Adam",
        learning_rate=3e-2,
        batch_size=batch_size,
        num_epochs=12,
        gradient_clip=1.0,
        drop_last=False,
        seed=0,
        verbose=False,
    )


training, test = make_data(615), make_data(500)

# Two processes with batches of 32 make the same updates as one process with batches of 64.
alone = make_trainer(batch_size=64)
alone.fit(training, test)

two = DDPTrainer(make_trainer(batch_size=32), num_processes=2)
history = two.fit(training, test)

print(f"validation accuracy by epoch: {', '.join(f'{it:.0%}' for it in history.get_metric_values('valid_accuracy'))}")
progress = two.context.progress
print(f"{progress.updates} updates, {progress.records} samples")
assert progress == alone.context.progress

pairs = zip(two.model.parameters(), alone.model.parameters(), strict=True)
difference = max((a - b).abs().max().item() for a, b in pairs)
accuracy = two.unwrap().evaluate(test)["accuracy"]  # the inner trainer evaluates in this process
print(f"result: weights differ by {difference:.0e} from those of one process; test accuracy {accuracy:.1%}")
assert difference < 1e-9
assert accuracy > 0.9
