from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from dovetail.callbacks import Timer
from dovetail.trainers.context import TrainingContext
from dovetail.units import Batches, Epochs


class Clock:
    """Advances by one second at every reading."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_times_and_speeds_have_known_answers(make: Callable[..., Any], data: Any) -> None:
    # Readings of every epoch: its start, validation start, validation end, its end.
    trainer = make(timer := Timer(Clock()))
    trainer.fit(None, data, max_length=Epochs(2))
    assert timer.epochs == [3.0, 3.0]
    assert timer.validations == [1.0, 1.0]
    assert timer.summary() == {
        "epochs": 2,
        "epoch_seconds": 3.0,
        "validations": 2,
        "validation_seconds": 1.0,
        "training_seconds": 4.0,
        "batches_per_second": 2.5,
        "samples_per_second": 20.0,
    }


def test_an_unfinished_epoch_counts_into_the_speed_only(make: Callable[..., Any]) -> None:
    make(timer := Timer(Clock())).fit(max_length=Batches(7))
    assert timer.epochs == [1.0]
    assert timer.batches_per_second == 3.5


def test_measures_survive_a_resume(make: Callable[..., Any]) -> None:
    begun = make(Timer(Clock()))
    begun.fit(max_length=Batches(7))
    resumed = make(timer := Timer(Clock()))
    resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
    resumed.fit(max_length=Epochs(2))
    assert timer.epochs == [1.0, 1.0]
    assert timer.summary()["training_seconds"] == 3.0
    assert timer.batches_per_second == 10 / 3


def test_nothing_measured_is_nan() -> None:
    summary = Timer().summary()
    assert math.isnan(summary["epoch_seconds"])
    assert math.isnan(summary["samples_per_second"])


def test_no_hook_runs_in_a_step() -> None:
    context = TrainingContext()
    context.callbacks.add(Timer)
    assert not context.callbacks.on_step_start + context.callbacks.on_step_end + context.callbacks.on_update
