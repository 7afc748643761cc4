"""Folds of a data set for cross-validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from dovetail.data.sources import holds_samples
from dovetail.errors import DataError
from dovetail.units import check_count


def k_fold(data: Any, k: int = 5, seed: int = 0, stratify: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield k pairs of training and validation data; every sample is in the validation data of exactly one pair.

    Args:
        data: A tensor or array, a tuple of them, or a dataset with a length. The parts of the first two are of the same
            form, and each part of a dataset is a `Subset`.
        k: The number of folds.
        seed: Determines which samples share a fold.
        stratify: The class of every sample, so that each fold has nearly the same share of each class; True means the
            last element of a tuple. None draws folds without regard to classes.

    Raises:
        DataError: The data has no samples by index, or too few of them.

    Example:
        >>> x, y = torch.arange(6.0), torch.tensor([0, 0, 0, 1, 1, 1])
        >>> for train, valid in k_fold((x, y), k=3, stratify=True):
        ...     print(len(train[0]), valid[1].tolist())
        4 [0, 1]
        4 [0, 1]
        4 [0, 1]
    """
    check_count("k_fold: k", k, least=2)
    length = _length(data)
    if length < k:
        raise DataError(f"k_fold: expected at least {k} samples for {k} folds, got {length}")
    order = np.random.default_rng(seed).permutation(length)
    if stratify is not None and stratify is not False:
        classes = _classes(data, stratify, length)
        # Stable, so that the samples of a class keep their random order and are dealt to the folds in turn.
        order = order[np.argsort(classes[order], kind="stable")]
    folds = [np.sort(order[number::k]) for number in range(k)]

    # A function of its own, so that the checks above run before the first pair is read.
    def pairs() -> Iterator[tuple[Any, Any]]:
        for number, valid in enumerate(folds):
            train = np.sort(np.concatenate(folds[:number] + folds[number + 1 :]))
            yield _part(data, train), _part(data, valid)

    return pairs()


def _length(data: Any) -> int:
    columns: Sequence[Any] = data if isinstance(data, tuple) and data else (data,)
    if not all(holds_samples(column) and isinstance(column, Sized) for column in columns):
        raise DataError(
            "k_fold: expected a tensor or array, a tuple of them, or a dataset with a length, got a "
            f"{type(data).__name__}"
        )
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise DataError(f"k_fold: expected arrays with the same number of samples, got {sorted(lengths)}")
    return lengths.pop()


def _classes(data: Any, stratify: Any, length: int) -> np.ndarray[Any, Any]:
    if stratify is True:
        if not isinstance(data, tuple):
            raise DataError("k_fold: stratify=True needs a tuple (x, y); give the class of every sample")
        stratify = data[-1]
    classes = np.asarray(stratify.cpu() if isinstance(stratify, Tensor) else stratify)
    if classes.shape != (length,):
        raise DataError(f"k_fold: stratify: expected the class of each of {length} samples, got shape {classes.shape}")
    return classes


def _part(data: Any, indices: np.ndarray[Any, Any]) -> Any:
    if isinstance(data, tuple):
        return tuple(_part(column, indices) for column in data)
    if isinstance(data, Tensor):
        return data[torch.from_numpy(indices).to(data.device)]
    return data[indices] if isinstance(data, np.ndarray) else Subset(data, indices.tolist())
