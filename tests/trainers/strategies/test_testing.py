"""The testing strategy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail.errors import DataError
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import DefaultTestingStrategy

LOGITS = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
CLASSES = torch.tensor([1, 0, 0, 1])


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_accuracy_does_not_depend_on_the_batch_size(batch_size: int, context: TrainingContext) -> None:
    config = {"batch_size": batch_size}
    data = TensorDataset(LOGITS, CLASSES)
    assert DefaultTestingStrategy().test_model(nn.Identity(), config, data, None, context) == 0.75


def test_accuracy_is_computed_over_the_sampled_items(context: TrainingContext) -> None:
    data = TensorDataset(LOGITS, CLASSES)
    assert DefaultTestingStrategy().test_model(nn.Identity(), {}, data, [0, 3], context) == 0.5


def test_accuracy_of_empty_data_is_zero(context: TrainingContext) -> None:
    data = TensorDataset(LOGITS, CLASSES)
    assert DefaultTestingStrategy().test_model(nn.Identity(), {}, data, [], context) == 0.0


def test_accuracy_accepts_one_hot_labels(context: TrainingContext) -> None:
    data = (LOGITS, nn.functional.one_hot(CLASSES).float())
    assert DefaultTestingStrategy().test_model(nn.Identity(), {}, data, None, context) == 0.75


def test_accuracy_of_sequences_counts_positions(context: TrainingContext) -> None:
    data = (LOGITS.T.reshape(1, 2, 4), CLASSES.reshape(1, 4))
    assert DefaultTestingStrategy().test_model(nn.Identity(), {}, data, None, context) == 0.75


def test_accuracy_rejects_data_without_labels(context: TrainingContext) -> None:
    with pytest.raises(DataError, match="no labels"):
        DefaultTestingStrategy().test_model(nn.Identity(), {}, LOGITS, None, context)
