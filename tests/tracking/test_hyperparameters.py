from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.callbacks import Callback
from dovetail.tracking.hyperparameters import flatten, hyperparameters_of
from dovetail.trainers import AMPTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import configure
from dovetail.units import Epochs


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "API-KEY", "api_tkn", "token", "db_password", "client_secret", "aws.access_key", "auth"],
)
def test_secrets_are_masked(name: str) -> None:
    assert flatten({name: "hunter2"}) == {name: "***"}


def test_everything_below_the_name_of_a_secret_is_masked() -> None:
    assert flatten({"credentials": {"user": "me", "pin": 1234}}) == {"credentials": "***"}


@pytest.mark.parametrize("name", ["num_tokens", "key", "author", "tokenizer", "monkey", "keyboard"])
def test_names_that_are_not_secret_are_shown(name: str) -> None:
    assert flatten({name: 3}) == {name: 3}


def test_a_password_in_an_address_is_masked() -> None:
    assert flatten({"storage": "postgresql://me:hunter2@host/db"}) == {"storage": "postgresql://***@host/db"}


def test_nested_settings_have_dotted_names() -> None:
    assert flatten({"model": {"width": 3, "depth": {"encoder": 2}}}) == {"model.width": 3, "model.depth.encoder": 2}


def test_a_dataclass_is_logged_as_its_name_and_fields() -> None:
    @dataclass
    class Cosine:
        floor: float = 0.5

    assert flatten({"schedule": Cosine()}) == {"schedule": "Cosine", "schedule.floor": 0.5}


def test_a_partial_function_is_logged_as_its_name_and_keywords() -> None:
    assert flatten({"optimizer": partial(torch.optim.SGD, lr=0.1)}) == {"optimizer": "SGD", "optimizer.lr": 0.1}


def test_logged_values_are_plain() -> None:
    given = {
        "path": Path("a/b"),
        "device": torch.device("cpu"),
        "rate": torch.tensor(0.5),
        "width": np.int64(3),
        "betas": (0.9, 0.99),
        "data": torch.zeros(1000),
        "none": None,
    }
    assert flatten(given) == {
        "path": "a/b",
        "device": "cpu",
        "rate": 0.5,
        "width": 3,
        "betas": "[0.9, 0.99]",
        "data": "Tensor",
        "none": None,
    }


def test_a_trainer_logs_its_arguments_and_the_values_in_use(make: Callable[..., Any]) -> None:
    trainer = make(batch_size=8, gradient_clip=2.0)
    configure(trainer, {"temperature": 0.07, "api_key": "hunter2"})
    trainer.fit(max_length=Epochs(1))
    found = hyperparameters_of(trainer.context)
    assert found["max_length"] == "Epochs(1)"
    assert found["model"] == "Sequential"
    assert found["model.parameters"] == 32
    assert found["optimizer"] == "SGD"
    assert (found["optimizer.lr"], found["optimizer.momentum"]) == (0.1, 0.9)
    assert (found["temperature"], found["api_key"]) == (0.07, "***")


def test_a_running_trainer_logs_the_options_that_the_user_gave(make: Callable[..., Any]) -> None:
    found: list[dict[str, Any]] = []

    class Recorder(Callback):
        def on_train_start(self, context: TrainingContext) -> None:
            found.append(hyperparameters_of(context))

    trainer = AMPTrainer(make(gradient_clip=0.5, accumulation_steps=2, shuffle=False), precision="bf16")
    trainer.context.callbacks.add(Recorder())
    trainer.fit(max_length=Epochs(1))
    given = {"gradient_clip": 0.5, "accumulation_steps": 2, "shuffle": False}
    assert {name: found[0].get(name) for name in given} == given
    assert "num_epochs" not in found[0]
