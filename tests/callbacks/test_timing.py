from __future__ import annotations

import copy
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.callbacks import MaxTime, Timer
from dovetail.errors import ConfigError
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
        "tokens_per_second": 0.0,
    }


def test_the_history_has_the_speed_of_every_epoch(make: Callable[..., Any], data: Any) -> None:
    trainer = make(Timer(Clock(), record=True))
    history = trainer.fit(None, data, max_length=Epochs(2))
    # 40 samples in 5 batches, in the two seconds besides the validation.
    assert history.get_metric_values("speed_samples_per_second") == [20.0, 20.0]
    assert history.get_metric_values("speed_batches_per_second") == [2.5, 2.5]


def test_an_unfinished_epoch_counts_only_for_the_speed(make: Callable[..., Any]) -> None:
    make(timer := Timer(Clock())).fit(max_length=Batches(7))
    assert timer.epochs == [1.0]
    assert timer.batches_per_second == 3.5


def test_measured_times_survive_a_resume(make: Callable[..., Any]) -> None:
    started = make(Timer(Clock()))
    started.fit(max_length=Batches(7))
    resumed = make(timer := Timer(Clock()))
    resumed.load_state_dict(copy.deepcopy(started.state_dict()))
    resumed.fit(max_length=Epochs(2))
    assert timer.epochs == [1.0, 1.0]
    assert timer.summary()["training_seconds"] == 3.0
    assert timer.batches_per_second == 10 / 3


def test_unmeasured_times_are_nan() -> None:
    summary = Timer().summary()
    assert math.isnan(summary["epoch_seconds"])
    assert math.isnan(summary["samples_per_second"])


def test_the_timing_callback_runs_no_hook_per_step() -> None:
    context = TrainingContext()
    context.callbacks.add(Timer)
    assert not context.callbacks.on_step_start + context.callbacks.on_step_end + context.callbacks.on_update


def test_a_run_stops_after_its_time_and_a_resume_continues_to_count(make: Callable[..., Any], tmp_path: Path) -> None:
    # Readings: one at the start, one at every batch (and so on): the fourth batch is at the fourth second.
    def build(limit: float) -> Any:
        return make(MaxTime(limit, Clock()), print_every=1, checkpoint_dir=tmp_path)

    stopped = build(4.0)
    stopped.fit(max_length=Epochs(3))
    assert (stopped.context.progress.batches, stopped.context.progress.epoch) == (4, 0)
    assert stopped.context.run.stop_reason == "max_time: 4 s of training, the limit is 4 s"

    # The time is used up: the resumed run trains nothing more.
    again = build(4.0)
    again.fit(max_length=Epochs(3), resume="auto")
    assert again.context.progress.batches == 4

    resumed, whole = build(20.0), make()
    resumed.fit(max_length=Epochs(2), resume="auto")
    whole.fit(max_length=Epochs(2))
    assert resumed.context.run.stop_reason is None
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)
    assert resumed.history.get_metric_values("train_loss") == whole.history.get_metric_values("train_loss")


def test_the_option_stops_and_the_next_fit_has_its_time_again(make: Callable[..., Any]) -> None:
    trainer = make(max_time=timedelta(microseconds=1), print_every=1)
    trainer.fit(max_length=Epochs(3))
    assert trainer.context.progress.batches == 1
    trainer.fit(max_length=Epochs(3))
    assert trainer.context.progress.batches == 2
    trainer.options.max_time = None
    trainer.fit(max_length=Epochs(3))
    assert trainer.context.progress.epoch == 3


def test_a_time_of_another_form_is_rejected(make: Callable[..., Any]) -> None:
    for wrong in ("12:00", "a:b:c", 0, -1, float("nan"), {"ours": 2}, True, [1]):
        with pytest.raises(ConfigError, match="max_time: expected a positive number of seconds"):
            make(max_time=wrong)
