from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from dovetail.data import k_fold
from dovetail.errors import ConfigError, DataError

X = torch.arange(23)


@pytest.mark.parametrize("k", [2, 5, 23])
def test_every_sample_is_validated_once_and_trained_otherwise(k: int) -> None:
    pairs = list(k_fold(X, k, seed=4))
    assert len(pairs) == k
    for train, valid in pairs:
        assert sorted([*train.tolist(), *valid.tolist()]) == X.tolist()
        assert len(valid) in (23 // k, 23 // k + 1)
    assert sorted(sample for _, valid in pairs for sample in valid.tolist()) == X.tolist()


def test_the_seed_determines_the_folds_and_every_form_has_the_same() -> None:
    def drawn(data: Any, seed: int) -> list[list[int]]:
        return [[int(sample[0]) for sample in zip(*valid, strict=True)] for _, valid in k_fold(data, 3, seed)]

    tensors, arrays = (X, X), (X.numpy(), X.numpy())
    assert drawn(tensors, 1) == drawn(tensors, 1) == drawn(arrays, 1) != drawn(tensors, 2)
    subsets = [valid for _, valid in k_fold(TensorDataset(X), 3, 1)]
    assert all(isinstance(subset, Subset) for subset in subsets)
    assert [[int(sample) for (sample,) in subset] for subset in subsets] == drawn(tensors, 1)


def test_strata_differ_by_at_most_one_sample() -> None:
    classes = np.array([0] * 12 + [1] * 8 + [2] * 3)
    for given in (True, classes, torch.from_numpy(classes)):
        counts = [np.bincount(valid[1], minlength=3) for _, valid in k_fold((X.numpy(), classes), 3, 1, given)]
        assert np.ptp(counts, axis=0).max() <= 1
    plain = [np.bincount(valid[1], minlength=3) for _, valid in k_fold((X.numpy(), classes), 3, 1)]
    assert np.ptp(plain, axis=0).max() > 1


def test_data_without_folds_is_rejected() -> None:
    with pytest.raises(ConfigError, match="k_fold: k: expected a whole number that is at least 2"):
        k_fold(X, 1)
    with pytest.raises(DataError, match="expected at least 5 samples for 5 folds, got 3"):
        k_fold(X[:3])
    with pytest.raises(DataError, match="got a list"):
        k_fold([X, X])
    with pytest.raises(DataError, match="same number of samples"):
        k_fold((X, X[:5]))
    with pytest.raises(DataError, match="needs a tuple"):
        k_fold(X, stratify=True)
    with pytest.raises(DataError, match="expected the class of each of 23 samples"):
        k_fold(X, stratify=X[:4])
