"""Fixtures of the strategy tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from dovetail import Epochs
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext


@pytest.fixture
def context() -> TrainingContext:
    return TrainingContext()


@pytest.fixture
def train() -> Callable[..., ComposableTrainer]:
    """Train a model with strategies, quietly, and return the trainer."""

    def run(model: nn.Module, data: Any, val_data: Any = None, epochs: int = 1, **strategies: Any) -> ComposableTrainer:
        trainer = ComposableTrainer(model, verbose=False, **strategies)
        trainer.fit(data, val_data, max_length=Epochs(epochs))
        return trainer

    return run
