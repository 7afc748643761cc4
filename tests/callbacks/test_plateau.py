from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau

from dovetail.callbacks import LambdaCallback, ReduceOnPlateau
from dovetail.errors import ConfigError
from dovetail.trainers.reuse import reset
from dovetail.units import Epochs

LOSSES = (3.0, 2.0, 2.0, 2.0, 2.0, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9, 1.9)


def rates_of(trainer: Any, num_epochs: int) -> list[list[float]]:
    rates = []
    record = LambdaCallback(
        on_epoch_end=lambda context, _: rates.append(
            [group["lr"] for optimizer in context.optimizers for group in optimizer.param_groups]
        )
    )
    trainer.context.callbacks.add(record)
    trainer.fit(max_length=Epochs(num_epochs))
    return rates


SETTINGS = [
    {"factor": 0.5, "patience": 1},
    {"factor": 0.1, "patience": 0, "cooldown": 2, "min_lr": 1e-3},
    {"factor": 0.5, "patience": 0, "threshold": 0.2, "threshold_mode": "abs"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_plateau_callback_gives_the_rates_of_torch(scripted: Callable[..., Any], settings: Any) -> None:
    reference = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = ReduceLROnPlateau(reference, **settings)
    expected = []
    for loss in LOSSES:
        scheduler.step(loss)
        expected.append([reference.param_groups[0]["lr"]])
    assert rates_of(scripted(ReduceOnPlateau(**settings)).script(*LOSSES), len(LOSSES)) == expected
    assert expected[-1] != [0.1]


def test_the_rate_of_every_parameter_group_is_lowered(scripted: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    optimizers = [
        torch.optim.SGD([{"params": model[0].weight, "lr": 0.4}, {"params": model[0].bias, "lr": 0.2}]),
        torch.optim.Adam(model[1].parameters(), lr=0.1),
    ]
    trainer = scripted(ReduceOnPlateau(factor=0.5, patience=0), model=model, optimizer=optimizers).script(1.0, 1.0)
    assert rates_of(trainer, 2) == [[0.4, 0.2, 0.1], [0.2, 0.1, 0.05]]


def test_an_accuracy_plateau_expects_rising_values(scripted: Callable[..., Any]) -> None:
    callback = ReduceOnPlateau("valid_accuracy", factor=0.5, patience=0)
    rates = rates_of(scripted(callback).script(0.5, 0.6, 0.5, name="accuracy"), 3)
    assert rates == [[0.1], [0.1], [0.05]]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_resumed_plateau_equals_an_uninterrupted_one(scripted: Callable[..., Any], settings: Any, cut: Any) -> None:
    straight = rates_of(scripted(ReduceOnPlateau(**settings)).script(*LOSSES), len(LOSSES))
    first = scripted(ReduceOnPlateau(**settings)).script(*LOSSES)
    first.fit(max_length=Epochs(cut))
    second = scripted(ReduceOnPlateau(**settings)).script(*LOSSES[cut:])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert rates_of(second, len(LOSSES)) == straight[cut:]


def test_a_further_fit_continues_the_plateau_count(scripted: Callable[..., Any]) -> None:
    trainer = scripted(ReduceOnPlateau(factor=0.5, patience=1)).script(1.0, 1.0)
    trainer.fit(max_length=Epochs(2))
    assert rates_of(trainer.script(1.0), 3) == [[0.05]]


def test_a_new_run_with_the_same_optimizer_resets_the_plateau(scripted: Callable[..., Any]) -> None:
    trainer = scripted(ReduceOnPlateau(factor=0.5, patience=1)).script(1.0)
    trainer.fit(max_length=Epochs(1))
    reset(trainer)
    assert rates_of(trainer.script(5.0, 4.0, 3.0), 3) == [[0.1], [0.1], [0.1]]


def test_plateau_state_survives_a_round_trip_without_a_run() -> None:
    state = {"schedulers": [{"best": 1.0, "num_bad_epochs": 1, "cooldown_counter": 0, "last_epoch": 2}]}
    callback = ReduceOnPlateau()
    callback.load_state_dict(state)
    assert callback.state_dict() == state


def test_the_plateau_callback_rejects_invalid_settings() -> None:
    with pytest.raises(ConfigError, match=r"factor: expected a number between 0 and 1, got 1\.5"):
        ReduceOnPlateau(factor=1.5)
    with pytest.raises(ConfigError, match="threshold_mode: expected 'rel' or 'abs', got 'x'"):
        ReduceOnPlateau(threshold_mode="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="patience: expected a whole number that is at least 0, got -1"):
        ReduceOnPlateau(patience=-1)
    with pytest.raises(ConfigError, match="cooldown: expected a whole number that is at least 0, got -1"):
        ReduceOnPlateau(cooldown=-1)


def test_a_reduction_undone_by_another_scheduler_warns(scripted: Callable[..., Any]) -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = LambdaLR(optimizer, lambda epoch: 1.0)
    trainer = scripted(ReduceOnPlateau(factor=0.5, patience=0), model=model, optimizer=optimizer, scheduler=constant)
    sentence = (
        r"ReduceOnPlateau has lowered a learning rate from 0\.1 to 0\.05, and a scheduler has set it to 0\.1 again"
    )
    with pytest.warns(UserWarning, match=sentence) as caught:
        rates_of(trainer.script(1.0, 1.0, 1.0, 1.0), 4)
    assert len(caught) == 1


def test_a_scheduler_that_multiplies_rates_keeps_reductions(scripted: Callable[..., Any]) -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rising = ExponentialLR(optimizer, 1.5)
    trainer = scripted(ReduceOnPlateau(factor=0.5, patience=0), model=model, optimizer=optimizer, scheduler=rising)
    rates_of(trainer.script(1.0, 1.0, 1.0, 1.0), 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 1.5**4 * 0.5**3)
