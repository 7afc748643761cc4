"""Tiny training problem, its hand-written solution, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """96 samples of 6 numbers in 3 classes, cut into 12 batches of 8."""

    x: Tensor
    y: Tensor

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(8), self.y.split(8), strict=True))  # type: ignore[no-untyped-call]

    def model(self, seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Linear(6, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 3)]
        return nn.Sequential(*layers).to(dtype)


def make_problem() -> Problem:
    generator = torch.Generator().manual_seed(42)
    x = torch.randn(96, 6, generator=generator)
    return Problem(x, (x[:, :3] + 0.3 * torch.randn(96, 3, generator=generator)).argmax(dim=1))


def train_by_hand(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    epochs: int = 1,
    after_backward: Callable[[], None] = lambda: None,
) -> list[float]:
    """A hand-written loop; returns the loss of every batch."""
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            after_backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), f"{name} differs by {(value - expected).abs().max():.3g}"
