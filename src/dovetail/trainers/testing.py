"""Test of a trainer's model with its testing strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.trainers.run_scope import custom_evaluation
from dovetail.trainers.single_process import SingleProcessTrainer


def accuracy_on(
    trainer: SingleProcessTrainer, testset: Any, sampler: Any = None, config: Mapping[str, Any] | None = None
) -> float:
    """Return the result of a trainer's testing strategy for its model.

    Args:
        trainer: The trainer.
        testset: Test data.
        sampler: Indices, a torch sampler, or an object with `.get()`; None means all data.
        config: Settings of this test, such as `batch_size`; they override the trainer's.

    Returns:
        Without a strategy the accuracy, or the loss if the metrics of the trainer have no accuracy.

    Example:
        >>> import torch
        >>> from dovetail import Trainer
        >>> model = torch.nn.Identity()
        >>> accuracy_on(Trainer(model, verbose=False), (torch.eye(4), torch.tensor([0, 1, 2, 0])))
        0.75
    """
    config, testing = config or {}, trainer.strategies.testing
    if testing is not None:
        settings = {**trainer.context.config, "test_batch_size": trainer._batch_size("test"), **config}
        with custom_evaluation(trainer._run_layer, "test"):
            return float(testing.test_model(trainer.model, settings, testset, sampler, trainer.context))
    size = int(config.get("batch_size", trainer._batch_size("test")))
    metrics = trainer.evaluate(trainer.get_test_loader(size, testset, sampler))
    return metrics.get("accuracy", metrics["loss"])
