from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from dovetail.errors import ConfigError
from dovetail.pytorch.lr_scheduler import LRScheduler

StepMode = LRScheduler.StepMode


def halving(lr: float = 1.0) -> StepLR:
    return StepLR(SGD([torch.zeros(1, requires_grad=True)], lr=lr), 1, gamma=0.5)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_the_wrapper_exposes_the_names_of_the_scheduler() -> None:
    scheduler = halving()
    wrapped = LRScheduler(scheduler, StepMode.MANUAL_STEP)
    wrapped.step()
    assert wrapped.get_last_lr() == scheduler.get_last_lr() == [0.5]
    assert wrapped.optimizer is scheduler.optimizer
    other = LRScheduler(halving(), StepMode.MANUAL_STEP)
    other.load_state_dict(wrapped.state_dict())
    assert other.get_last_lr() == [0.5]


def test_a_metric_reaches_a_plateau_scheduler() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    wrapped = LRScheduler(ReduceLROnPlateau(optimizer, factor=0.5, patience=0), StepMode.MANUAL_STEP)
    wrapped.step(1.0)
    wrapped.step(2.0)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("mode", "interval"),
    [
        (StepMode.STEP_EVERY_EPOCH, "epoch"),
        (StepMode.STEP_EVERY_BATCH, "batch"),
        (StepMode.STEP_EVERY_OPTIMIZER_STEP, "update"),
        (StepMode.MANUAL_STEP, "manual"),
    ],
)
def test_each_step_mode_is_an_interval_of_the_loop(mode: LRScheduler.StepMode, interval: str) -> None:
    scheduler = halving()
    bound = LRScheduler(scheduler, step_mode=mode, frequency=3).bound()
    assert (bound.scheduler, bound.interval, bound.frequency) == (scheduler, interval, 3)


@pytest.mark.parametrize("frequency", [0, -1, 1.5, True])
def test_a_frequency_must_be_a_positive_integer(frequency: Any) -> None:
    with pytest.raises(ConfigError, match=f"^frequency: expected a whole number from 1 on, got {frequency!r}$"):
        LRScheduler(halving(), StepMode.STEP_EVERY_EPOCH, frequency)


def test_an_unknown_step_mode_is_rejected() -> None:
    given: Any = "epoch"
    with pytest.raises(ConfigError, match=r"^step_mode: expected one of LRScheduler.StepMode \(.*\), got 'epoch'$"):
        LRScheduler(halving(), given)


@pytest.mark.parametrize("mode", [mode for mode in StepMode if mode is not StepMode.MANUAL_STEP])
def test_a_plateau_scheduler_requires_manual_steps(mode: LRScheduler.StepMode) -> None:
    scheduler = ReduceLROnPlateau(SGD([torch.zeros(1)], lr=1.0))
    with pytest.raises(ConfigError, match=f"expected MANUAL_STEP for ReduceLROnPlateau.*, got {mode.name}"):
        LRScheduler(scheduler, mode)
