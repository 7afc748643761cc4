"""Metrics of a run: their default, their device, and the names that a validation will measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dovetail.trainers.loaders import set_names
from dovetail.trainers.metrics import Metric, accuracy, as_metrics, validation_names
from dovetail.trainers.named_metrics import NamedMetric

if TYPE_CHECKING:
    from dovetail.trainers.single_process import SingleProcessTrainer


def prepare_run_metrics(trainer: SingleProcessTrainer) -> None:
    """Choose the metrics of a run if the user chose none, and set the names with which callbacks can be checked."""
    run = trainer.context.run
    if run.metrics_are_default:
        # Chosen again in every run: its configuration may name another loss.
        chosen = {"accuracy": accuracy} if trainer._classifies() else {}
        if run.metrics.keys() != chosen.keys():
            run.metrics = as_metrics(chosen)
    else:
        _prepare(run.metrics, trainer.criterion, trainer.context.device)
    run.validation_names = None
    # A step or an epoch of the user measures what it likes, so its names are unknown.
    if trainer._test_step is None and trainer.context.callbacks.on_validation_end:
        outermost = run.trainer or trainer
        if not any(map(outermost._customized_by, ("test_step", "val_epoch"))):
            run.validation_names = validation_names(run.metrics, set_names(trainer))


def _prepare(metrics: Mapping[str, Metric], criterion: Any, device: torch.device) -> None:
    """Move the metrics to the device of the outputs; metrics by name also depend on the loss."""
    for metric in metrics.values():
        if isinstance(metric, NamedMetric):
            metric.prepare(criterion, device)
        if isinstance(metric, nn.Module):
            metric.to(device)
