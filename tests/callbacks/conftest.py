from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.trainers.basic import Trainer

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(dim=1) > 0).long()


class Scripted(Trainer):
    """Trains for real, and validates to the values it is given."""

    valid: Iterable[dict[str, float] | None] = ()

    def val_epoch(self) -> dict[str, float] | None:
        return next(self._values)

    def script(self, *values: float | dict[str, float] | None, name: str = "loss") -> Scripted:
        self._values = iter([{name: value} if isinstance(value, float) else value for value in values])
        return self


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return X, Y


@pytest.fixture
def make() -> Callable[..., Any]:
    """Makes a trainer of the same tiny classifier: five batches of eight samples in every epoch."""

    def make(*callbacks: Any, kind: type[Trainer] = Trainer, lr: float = 0.1, **options: Any) -> Any:
        torch.manual_seed(0)
        model = options.pop("model", None) or nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        settings = {"batch_size": 8, "shuffle": False, "verbose": False, "seed": 3, **options}
        return kind(
            model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            callbacks=callbacks,
            train_dataset=(X, Y),
            **settings,
        )

    return make


@pytest.fixture
def scripted(make: Callable[..., Any]) -> Callable[..., Any]:
    def scripted(*callbacks: Any, **options: Any) -> Any:
        return make(*callbacks, kind=Scripted, **options)

    return scripted
