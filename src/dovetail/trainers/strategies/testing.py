"""Testing strategies: the accuracy of a model on a test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.data import as_loader, split_batch, to_device
from dovetail.errors import DataError
from dovetail.trainers.modules import entry_of, forward
from dovetail.trainers.strategies.base import TestingStrategy
from dovetail.trainers.strategies.nesting import Described

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


@dataclass(frozen=True, eq=False, repr=False)
class DefaultTestingStrategy(Described, TestingStrategy):
    """The accuracy: the share of samples whose largest output is their class; 0 without samples.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
        >>> data = (logits, torch.tensor([1, 0, 0, 1]))
        >>> DefaultTestingStrategy().test_model(nn.Identity(), {}, data, None, TrainingContext())
        0.75
    """

    def test_model(
        self, model: nn.Module, config: Mapping[str, Any], testset: Any, sampler: Any, context: TrainingContext
    ) -> float:
        """Return the accuracy on a test set.

        Args:
            model: The model, in evaluation mode.
            config: The batch size is `test_batch_size`, or else `batch_size`.
            testset: A dataset, tensors or arrays, or batches.
            sampler: The samples to use; None means all.
            context: Batches are moved to its device.
        """
        batch_size = config.get("test_batch_size") or config.get("batch_size", 64)
        correct: int | Tensor = 0
        total = 0
        with torch.no_grad():
            for batch in as_loader(testset, batch_size=batch_size, sampler=sampler):
                examples, labels = split_batch(to_device(batch, context.device, non_blocking=True))
                if labels is None:
                    raise DataError("the batch has no labels to compare the outputs with: give a testing_strategy")
                outputs = forward(model, examples)
                logits = entry_of(outputs, "logits")
                outputs = outputs if logits is None else logits
                if labels.is_floating_point() and labels.shape == outputs.shape:
                    labels = labels.argmax(dim=1)
                # Sum on the device: reading the value in every batch would wait for the device.
                correct = correct + (outputs.argmax(dim=1) == labels).sum()
                total += labels.numel()
        return int(correct) / total if total else 0.0
