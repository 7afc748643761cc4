"""Loaders of a trainer: batches built from the data of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dovetail.data import as_loader, split_batch
from dovetail.data.sources import holds_samples
from dovetail.errors import DataError
from dovetail.trainers.context import Stage
from dovetail.trainers.data_handling import TrainerData
from dovetail.trainers.strategies.adapters import OptionLoaderStrategy
from dovetail.trainers.strategies.data_loader import DefaultDataLoaderStrategy

if TYPE_CHECKING:
    from dovetail.trainers.single_process import SingleProcessTrainer

_OPTIONS = {"train": "train_dataset", "valid": "val_dataset", "test": "test_dataset", "predict": "test_dataset"}


def form_loader(trainer: SingleProcessTrainer, data: TrainerData, stage: Stage) -> Any:
    """Return the loader of a stage, built from the data of the stage, and store it for later calls.

    Samples go to the seams `get_train_loader` and `get_test_loader`. Data that is already in batches is read unchanged.
    """
    source = trainer.context.run.data.get(stage)
    if source is None:
        raise DataError(f"no {stage} data: pass it to the call, or {_OPTIONS[stage]}=… to the trainer")
    sampler = trainer._sampler if stage == "train" else None
    loader: Any
    # Most data is a tuple, and every call counts in a run of a few steps.
    if not isinstance(source, tuple) and not holds_samples(source):
        _check_batches(trainer, stage, source)
        loader = as_loader(source, batch_size=trainer._batch_size("train"), sampler=sampler)
    elif stage == "train":
        loader = trainer.get_train_loader(trainer._batch_size(stage), source, sampler)
    else:
        loader = trainer.get_test_loader(trainer._batch_size(stage), source)
    data.loaders[stage] = (source, loader)
    if stage == "train":
        trainer.context.state["train_loader"] = loader
    return loader


def _check_batches(trainer: SingleProcessTrainer, stage: Stage, source: Any) -> None:
    """Raise if data that should hold batches holds samples, or if a strategy that forms batches is also given."""
    steps_by_default = trainer._steps_by_default if stage == "train" else trainer._tests_by_default
    if isinstance(source, list) and source and steps_by_default:
        targets = split_batch(source[0])[1]
        is_number = isinstance(targets, (int, float, np.generic))
        if is_number or (isinstance(targets, (Tensor, np.ndarray)) and not targets.ndim):
            raise DataError(
                "a list holds batches, and its first item looks like a single sample: give (x, y) or a Dataset"
            )
    strategy = trainer.strategies.data_loader
    if stage == "train" and type(strategy) not in (DefaultDataLoaderStrategy, OptionLoaderStrategy):
        raise DataError(
            f"data_loader_strategy: {strategy!r} forms batches of samples, but a {type(source).__name__} holds "
            "batches already; give the dataset, or leave out the strategy"
        )
