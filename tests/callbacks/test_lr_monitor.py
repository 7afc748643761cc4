from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from dovetail.callbacks import LRMonitor
from dovetail.errors import ConfigError
from dovetail.units import Batches, Epochs, Updates


def lr_rows(history: Any) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key != "stage"} for row in history if row["stage"] == "lr"]


def test_the_lr_monitor_records_the_initial_rate_of_every_epoch(make: Callable[..., Any]) -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = make(LRMonitor(), model=model, optimizer=optimizer, scheduler=ExponentialLR(optimizer, 0.5))
    rows = lr_rows(trainer.fit(max_length=Epochs(3)))
    assert rows == [
        {"epoch": 0, "batches": 0, "updates": 0, "group0": 0.1, "group0_momentum": 0.9},
        {"epoch": 1, "batches": 5, "updates": 5, "group0": 0.05, "group0_momentum": 0.9},
        {"epoch": 2, "batches": 10, "updates": 10, "group0": 0.025, "group0_momentum": 0.9},
    ]


def test_the_lr_monitor_records_every_second_epoch(make: Callable[..., Any]) -> None:
    rows = lr_rows(make(LRMonitor(every=Epochs(2))).fit(max_length=Epochs(5)))
    assert [row["epoch"] for row in rows] == [0, 2, 4]


def test_the_lr_monitor_records_updates_from_the_first_one(make: Callable[..., Any]) -> None:
    rows = lr_rows(make(LRMonitor(every=Updates(4))).fit(max_length=Epochs(2)))
    assert [row["updates"] for row in rows] == [0, 4, 8]


def test_every_group_of_every_optimizer_has_a_name(make: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    optimizers = [
        torch.optim.SGD([{"params": model[0].weight, "lr": 0.4}, {"params": model[0].bias, "lr": 0.2}]),
        torch.optim.Adam(model[1].parameters(), lr=0.1, betas=(0.8, 0.9)),
    ]
    (row,) = lr_rows(make(LRMonitor(), model=model, optimizer=optimizers).fit(max_length=Epochs(1)))
    assert {name: value for name, value in row.items() if "group" in name} == {
        "group0": 0.4,
        "group0_momentum": 0.0,
        "group1": 0.2,
        "group1_momentum": 0.0,
        "optimizer1_group0": 0.1,
        "optimizer1_group0_momentum": 0.8,
    }


@pytest.mark.parametrize("every", [Batches(1), Updates(0), 3])
def test_unknown_periods_are_rejected(every: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected Epochs\(n\) or Updates\(n\)"):
        LRMonitor(every=every)
