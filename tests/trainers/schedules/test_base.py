"""Schedules: recorded values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problem import Problem
from torch.optim import SGD

from dovetail import Epochs, Trainer
from dovetail.errors import ConfigError
from dovetail.trainers.schedules import DecayWhenAcc, EpochSet, LinearDecay, Triangular, TriangularDecayWhenAcc


def recording(**more: Any) -> Triangular:
    return Triangular(lr_min=0.0, lr_max=1.0, stepsize=4, **{"lr_history_size": 0, **more})


def make(problem: Problem, schedule: Any, **options: Any) -> Trainer:
    return Trainer(problem.model(), "cpu", optim_function="SGD", lr_scheduler=schedule, verbose=False, **options)


def test_a_schedule_records_no_rates_by_default(problem: Problem) -> None:
    for schedule in (Triangular(), recording(lr_history_size=None), recording(no_lr_history=True)):
        make(problem, schedule).fit(problem.batches, max_length=Epochs(1))
        assert schedule.lr_history is None


def test_training_records_the_rate_of_every_update(problem: Problem) -> None:
    schedule = recording()
    history = make(problem, schedule).fit(problem.batches, max_length=Epochs(1))
    assert schedule.lr_history == [schedule.value(count) for count in range(12)]
    assert len(schedule.lr_history) == len(history.losses)


def test_a_schedule_of_epochs_records_the_rate_of_every_epoch(problem: Problem) -> None:
    schedule = EpochSet({0: 0.1, 2: 0.01}, lr_value=True, lr_history_size=10)
    make(problem, schedule).fit(problem.batches, max_length=Epochs(4))
    assert schedule.lr_history == [0.1, 0.1, 0.01, 0.01]


def test_a_record_size_limits_the_number_of_recorded_rates(problem: Problem) -> None:
    schedule = recording(lr_history_size=5)
    make(problem, schedule).fit(problem.batches, max_length=Epochs(1))
    assert schedule.lr_history == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_calls_of_get_lr_are_recorded() -> None:
    schedule = recording()
    assert schedule.lr_history == [schedule.get_lr(count) for count in range(6)] != []
    falling = DecayWhenAcc(initial_lr=1.0, lr_decay=0.5, lr_history_size=0)
    assert falling.lr_history == [falling.get_lr(accuracy) for accuracy in (0.8, 0.5)] == [1.0, 0.5]
    both = TriangularDecayWhenAcc(stepsize=10, lr_history_size=0)
    assert both.lr_history == [both.get_lr(10, 0.8)] == [1.0]


@pytest.mark.parametrize("tries", [lambda it, data: it.fit(data, data, dry_run=True), lambda it, _: it.explain()])
def test_dry_runs_record_no_rates(problem: Problem, tries: Any, tmp_path: Any) -> None:
    schedule = recording()
    trainer = make(problem, schedule, checkpoint_dir=tmp_path, train_dataset=problem.batches)
    trainer.fit(max_length=Epochs(1))
    before = list(schedule.lr_history or ())
    tries(trainer, problem.batches)
    assert schedule.lr_history == before != []


def test_recorded_values_do_not_affect_equality() -> None:
    assert recording() == recording(lr_history_size=3)
    assert "history" not in repr(recording())


def test_the_state_of_a_recording_scheduler_fits_one_that_does_not_record() -> None:
    optimizer = SGD([torch.zeros(1)], lr=1.0)
    reported, quiet = (recording(lr_history_size=size).bind(optimizer) for size in (0, None))
    reported.step()
    quiet.load_state_dict(reported.state_dict())
    assert quiet.last_epoch == 1
    reported.load_state_dict(quiet.state_dict())
    assert reported.schedule.lr_history == []


def test_an_invalid_record_size_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="LinearDecay: lr_history_size: expected a whole number that is at least 0"):
        LinearDecay(lr_history_size=2.5)  # type: ignore[arg-type]  # a user's mistake


@pytest.mark.parametrize("schedule", [4.2, [0, 4, 2], None])
def test_epochs_with_values_must_be_a_mapping(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="EpochSet: expected a mapping of epochs to values, "):
        EpochSet(schedule)
