from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.tracking import Logger, Run, Status, Value
from dovetail.trainers.basic import Trainer

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(dim=1) > 0).long()


class Memory(Logger):
    """Stores the received values; fails on request."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.runs: list[Run] = []
        self.rows: list[tuple[int, dict[str, Value]]] = []
        self.statuses: list[Status] = []
        self.calls: list[str] = []

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method == self.fails_in:
            raise ConnectionError("no route to host\nand much more to say about it")

    def start(self, run: Run) -> None:
        self._called("start")
        self.runs.append(run)

    def log(self, values: Mapping[str, Value], step: int) -> None:
        self._called("log")
        self.rows.append((step, dict(values)))

    def finish(self, status: Status) -> None:
        self._called("finish")
        self.statuses.append(status)

    def series(self, name: str) -> list[tuple[int, Any]]:
        return [(step, values[name]) for step, values in self.rows if name in values]


@pytest.fixture
def memory() -> type[Memory]:
    return Memory


@pytest.fixture
def make() -> Callable[..., Any]:
    """Makes a trainer of the same tiny classifier: five batches of eight samples in every epoch."""

    def make(*callbacks: Any, kind: type[Trainer] = Trainer, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {"batch_size": 8, "shuffle": False, "verbose": False, "seed": 3, "print_every": 2, **options}
        return kind(
            model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            callbacks=callbacks,
            train_dataset=(X, Y),
            val_dataset=(X, Y),
            **settings,
        )

    return make


@pytest.fixture
def figure() -> Any:
    figures = pytest.importorskip("matplotlib.figure")
    made = figures.Figure(figsize=(1, 1))
    made.add_subplot().plot([0, 1])
    return made
