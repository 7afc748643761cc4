"""Chains of torch schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD

from dovetail.trainers.schedules import CosineAnnealingScheduler, SchedulerBase, SchedulerChain, WarmUpScheduler


def make_optimizer() -> SGD:
    return SGD([torch.zeros(1)], lr=1.0)


class Halving(SchedulerBase):
    """A scheduler in the manner of torch, which knows `get_lr` alone."""

    def get_lr(self) -> list[Any]:
        return [rate * 0.5**self.last_epoch for rate in self.base_lrs]


class Counting(SchedulerBase):
    """A scheduler that counts its own calls, as torch does."""

    def __init__(self, optimizer: SGD, total_iters: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_iters, eta_min, last_epoch)

    def get_lr(self) -> list[Any]:
        return [rate * self._step_count / self.total_iters for rate in self.base_lrs]


def test_a_chain_switches_schedulers_at_the_sum_of_their_lengths() -> None:
    optimizer = make_optimizer()
    lengths = (3, 5, 2)
    chain = SchedulerChain(*(CosineAnnealingScheduler(optimizer, length) for length in lengths))
    assert chain.next_iters == [3, 8]
    assert chain.total_iters == 10
    assert all(chain.lrs_at(step) == [1.0] for step in chain.next_iters)
    assert SchedulerChain(WarmUpScheduler(make_optimizer(), 4)).next_iters == []


def test_a_scheduler_that_defines_get_lr_steps_as_in_torch() -> None:
    optimizer = make_optimizer()
    scheduler = Halving(optimizer, 4)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [1.0, 0.5, 0.25, 0.125]


def test_a_scheduler_that_defines_get_lr_can_be_part_of_a_chain() -> None:
    optimizer = make_optimizer()
    chain = SchedulerChain(Counting(optimizer, 2), Halving(optimizer, 3))
    rates = []
    for _ in range(chain.total_iters):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        chain.step()
    assert rates == [0.5, 1.0, 1.0, 0.5, 0.25]
    assert [link.last_epoch for link in chain.schedulers] == [0, 0]


def test_a_scheduler_without_any_method_cannot_be_instantiated() -> None:
    with pytest.raises(TypeError, match=r"SchedulerBase: expected a class that defines lrs_at\(step\) or get_lr\(\)"):
        SchedulerBase(make_optimizer(), 4)
