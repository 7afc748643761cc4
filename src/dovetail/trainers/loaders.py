"""Loaders of a trainer: batches built from the data of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler, Subset, TensorDataset

from dovetail.data import as_loader
from dovetail.data.columns import Columns
from dovetail.data.forms import DataForm
from dovetail.data.named_sets import named_sets
from dovetail.data.sources import holds_samples
from dovetail.errors import ConfigError, DataError
from dovetail.trainers.catalog import takes_numbers
from dovetail.trainers.context import Stage
from dovetail.trainers.data_handling import TrainerData
from dovetail.trainers.strategies.adapters import OptionLoaderStrategy
from dovetail.trainers.strategies.data_loader import DefaultDataLoaderStrategy
from dovetail.trainers.strategies.weighting import WeightedLoss, WeightedTargets

if TYPE_CHECKING:
    from dovetail.trainers.single_process import SingleProcessTrainer

_OPTIONS = {"train": "train_dataset", "valid": "val_dataset", "test": "test_dataset", "predict": "test_dataset"}


def source_of(trainer: SingleProcessTrainer, stage: Stage) -> Any:
    """Return the data of a stage, or None; with `overfit_batches`, validation reads the training data."""
    read: Stage = "train" if stage == "valid" and trainer.options.overfit_batches else stage
    return trainer.context.run.data.get(read)


def set_names(trainer: SingleProcessTrainer) -> Iterable[str]:
    """Return the names of the validation sets; none if there is only one set."""
    return named_sets(source_of(trainer, "valid")) or ()


def form_loader(trainer: SingleProcessTrainer, data: TrainerData, stage: Stage) -> Any:
    """Return the loader of a stage, built from the data of the stage, and store it for later calls.

    `get_train_loader` and `get_test_loader` of the trainer form batches of samples. Data in batches is read unchanged.
    """
    source, overfits = source_of(trainer, stage), bool(trainer.options.overfit_batches)
    if source is None:
        raise DataError(f"no {stage} data: pass it to the call, or {_OPTIONS[stage]}=… to the trainer")
    sampler = trainer._sampler if stage == "train" else None
    loader: Any
    # Most data is a pair of tensors, and every call counts in a run of a few steps.
    is_pair = type(source) is tuple and len(source) == 2 and isinstance(source[0], Tensor)
    is_ready = is_pair and isinstance(source[1], Tensor) and source[1].dtype == torch.int64
    samples = source if is_ready else _converted(trainer, data, stage, source)
    weighted = trainer._weighted
    if weighted is not None and weighted.is_balanced:
        _count_classes(trainer, weighted, samples if stage == "train" else trainer.context.run.data.get("train"))
    if not isinstance(samples, tuple) and not holds_samples(samples, trainer.options.collate_fn):
        _check_batches(trainer, stage, source)
        is_list = isinstance(samples, list) and sampler is None
        loader = samples if is_list else as_loader(samples, batch_size=1, sampler=sampler)
    elif stage == "train" or (stage == "valid" and overfits):
        loader = trainer.get_train_loader(trainer._batch_size("train"), samples, sampler)
    else:
        loader = trainer.get_test_loader(trainer._batch_size(stage), samples)
    if overfits and stage == "train" and isinstance(getattr(loader, "sampler", None), RandomSampler):
        raise DataError("overfit_batches: the loader shuffles; give the dataset, or a loader with shuffle=False")
    # With the source, so that `_loader` notices when the data of the stage is replaced.
    data.loaders[data.key(stage)] = (source, loader)
    if stage == "train":
        # For strategies that need the number of batches.
        trainer.context.state["train_loader"] = loader
    return loader


def _converted(trainer: SingleProcessTrainer, data: TrainerData, stage: Stage, source: Any) -> Any:
    """Return the data of a stage as tensors, a dataset or batches, in the types that model and loss need."""
    options, model, criterion = trainer.options, trainer.context.model, trainer.criterion
    by_default = trainer._steps_by_default if stage == "train" else trainer._tests_by_default
    if isinstance(source, list) and not by_default and options.collate_fn is None:
        # A step of the user may take batches of any form.
        return source
    parameters = () if model is None else model.parameters()
    types = (it.dtype for it in parameters if it.is_floating_point())
    target_type: Literal["classes", "numbers"] | None = None
    if by_default and stage != "predict":
        target_type = "classes" if trainer._classifies() else "numbers" if takes_numbers(criterion) else None
    form = DataForm(
        target=options.target,
        sample_weight=options.sample_weight,
        needs_target=by_default and stage != "predict",
        dtype=next(types, torch.get_default_dtype()),
        target_type=target_type,
        collates=options.collate_fn is not None,
        features=None if stage == "train" else data.features,
    )
    samples = form.convert(source)
    if stage == "train":
        data.features = form.features
    return samples


def _count_classes(trainer: SingleProcessTrainer, weighted: WeightedLoss, samples: Any) -> None:
    """Give the labels of the training data to a loss with balanced weights."""
    if samples is None:
        return
    if not isinstance(samples, (tuple, Dataset)):
        samples = _converted(trainer, TrainerData(trainer.context, {}), "train", samples)
    while type(samples) is Subset:
        chosen = list(samples.indices)
        samples = samples.dataset[chosen] if isinstance(samples.dataset, TensorDataset) else samples.dataset
    if isinstance(samples, TensorDataset):
        samples = samples.tensors
    columns = samples.columns if isinstance(samples, Columns) else samples
    labels = trainer._split(columns)[1] if isinstance(columns, (tuple, dict)) else None
    labels = labels.targets if isinstance(labels, WeightedTargets) else labels
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise ConfigError(
            "class_weight: 'balanced' needs class numbers in memory: arrays, a data frame, a dictionary of arrays or a "
            f"TensorDataset, got a {type(samples).__name__}; give the weights instead"
        )
    weighted.count_classes(labels)


def _check_batches(trainer: SingleProcessTrainer, stage: Stage, source: Any) -> None:
    """Raise if data holds batches, and a strategy that forms batches is also given."""
    strategy = trainer.strategies.data_loader
    if stage == "train" and type(strategy) not in (DefaultDataLoaderStrategy, OptionLoaderStrategy):
        raise DataError(
            f"data_loader_strategy: {strategy!r} forms batches of samples, but a {type(source).__name__} holds "
            "batches already; give the dataset, or leave out the strategy"
        )
