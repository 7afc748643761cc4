from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.tracking.hyperparameters import flatten, hyperparameters_of
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
def test_other_names_are_shown(name: str) -> None:
    assert flatten({name: 3}) == {name: 3}


def test_a_password_in_an_address_is_masked() -> None:
    assert flatten({"storage": "postgresql://me:hunter2@host/db"}) == {"storage": "postgresql://***@host/db"}


def test_nested_settings_have_dotted_names() -> None:
    assert flatten({"model": {"width": 3, "depth": {"encoder": 2}}}) == {"model.width": 3, "model.depth.encoder": 2}


def test_a_data_class_is_its_name_and_its_fields() -> None:
    @dataclass
    class Cosine:
        floor: float = 0.5

    assert flatten({"schedule": Cosine()}) == {"schedule": "Cosine", "schedule.floor": 0.5}


def test_a_partial_function_is_its_name_and_its_keywords() -> None:
    assert flatten({"optimizer": partial(torch.optim.SGD, lr=0.1)}) == {"optimizer": "SGD", "optimizer.lr": 0.1}


def test_values_are_plain() -> None:
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


def test_a_trainer_shows_what_it_was_given_and_what_it_uses(make: Callable[..., Any]) -> None:
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
