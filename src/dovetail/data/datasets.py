"""Datasets that need no download."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dovetail.data.idx import read_idx
from dovetail.errors import ConfigError, DataError
from dovetail.extras import require

# The folder of Debian's package.
_FASHION_MNIST = "/usr/share/datasets/fashion-mnist"


def digits(split: Sequence[float] = (0.7, 0.15, 0.15), seed: int = 0) -> tuple[TensorDataset, ...]:
    """Return scikit-learn's 1797 handwritten digits, as one dataset per part of `split`.

    Images are float32 in 0..1 of shape (1, 8, 8), labels are int64. Every part has the same proportions of digits.

    Args:
        split: The shares of the parts, such as training, validation and test; their sum is at most 1.
        seed: The seed of the split.

    Example:
        >>> train, valid, test = digits()
        >>> train.tensors[0].shape, len(valid), len(test)
        (torch.Size([1258, 1, 8, 8]), 270, 269)
    """
    if not split or min(split) < 0 or sum(split) > 1 + 1e-9:
        raise DataError(f"split: expected shares that add up to at most 1, got {tuple(split)}")
    bunch = require("sklearn.datasets", "datasets").load_digits()
    # Pixels are whole numbers from 0 to 16.
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)

    generator = torch.Generator().manual_seed(seed)
    bounds = [0.0, *itertools.accumulate(split)]
    parts: list[list[torch.Tensor]] = [[] for _ in split]
    for digit in range(10):
        members = (labels == digit).nonzero().squeeze(1)
        members = members[torch.randperm(len(members), generator=generator)]
        cuts = [round(bound * len(members)) for bound in bounds]
        for part, (first, last) in zip(parts, itertools.pairwise(cuts), strict=True):
            part.append(members[first:last])
    # In the original order, not grouped by digit.
    indices = [torch.cat(part).sort().values for part in parts]
    return tuple(TensorDataset(images[chosen], labels[chosen]) for chosen in indices)


def fashion_mnist(folder: str | os.PathLike[str] | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Return Fashion-MNIST as 60,000 samples for training and 10,000 for tests, read from its IDX files.

    Images are float32 in 0..1 of shape (1, 28, 28), labels are int64 in 0..9. The files of MNIST have the same names
    and are accepted, too.

    Args:
        folder: The folder with the four files, compressed or not. None means the folder in the environment variable
            `DOVETAIL_FASHION_MNIST`, or else the one of Debian's package `dataset-fashion-mnist`.

    Raises:
        DataError: A file is missing or damaged.
    """
    place = Path(folder or os.environ.get("DOVETAIL_FASHION_MNIST") or _FASHION_MNIST)
    return _images(place, "train"), _images(place, "t10k")


def _images(folder: Path, part: str) -> TensorDataset:
    image_file, label_file = _file(folder, f"{part}-images-idx3-ubyte"), _file(folder, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(image_file), read_idx(label_file)
    if images.dtype != torch.uint8 or images.ndim != 3:
        raise DataError(f"{image_file}: expected bytes in three dimensions, got {_shape(images)}")
    if labels.dtype != torch.uint8 or labels.shape != images.shape[:1]:
        raise DataError(f"{label_file}: expected one byte for each of {len(images)} images, got {_shape(labels)}")
    if len(labels) and labels.max() > 9:
        raise DataError(f"{label_file}: expected labels from 0 to 9, got {int(labels.max())}")
    return TensorDataset(images.unsqueeze(1).float().div_(255), labels.long())


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{folder} has no {name} or {name}.gz: apt-get install dataset-fashion-mnist, "
        "or give the folder that has them (folder=, or the environment variable DOVETAIL_FASHION_MNIST)"
    )


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


_FEATURES, _CLASSES = 60, 10
_SCALES = np.arange(1, _FEATURES + 1) ** -0.6


@dataclass(frozen=True)
class LeafSynthetic:
    """Synthetic(α, β) of the FedProx paper (Li et al., 2020, section 5.1): a logistic model per client.

    Client k draws u ~ N(0, α) and B ~ N(0, β), its model W ~ N(u, 1), b ~ N(u, 1), the mean of its inputs v ~ N(B, 1),
    inputs x ~ N(v, Σ) of 60 features with the diagonal Σ_jj = j^-1.2, and labels argmax(Wx + b) out of 10. Its number
    of samples is 50 plus a log-normal number. As in the authors' code, α and β are standard deviations.

    The data of a client is a function of seed and id. It is generated by each call and not stored.

    Attributes:
        alpha: How much models differ between clients.
        beta: How much inputs differ between clients.
        seed: The seed of all data.
        iid: Whether all clients share one model, drawn from N(0, 1), and inputs around 0; α and β are then ignored.
        log_size: Mean and standard deviation of the logarithm of the log-normal number.
        min_samples: The number that is added to it.
        max_samples: The largest number of samples of a client; None means no limit.
        test_share: The share of a client's samples that is for tests.

    Example:
        >>> data = LeafSynthetic(alpha=1, beta=1)
        >>> x, y = data.train(client_id=3)
        >>> x.shape == (data.num_train(3), 60), y.dtype, len(data.test(3)[1]) + len(y) == data.num_samples(3)
        (True, torch.int64, True)
    """

    alpha: float = 1.0
    beta: float = 1.0
    seed: int = 0
    iid: bool = False
    log_size: tuple[float, float] = (4.0, 2.0)
    min_samples: int = 50
    max_samples: int | None = None
    test_share: float = 0.2

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "seed", "min_samples"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if not 0 <= self.test_share < 1:
            raise ConfigError(f"test_share: expected 0 or more and less than 1, got {self.test_share}")
        if self.max_samples is not None and self.max_samples < max(1, self.min_samples):
            raise ConfigError(f"max_samples: expected {max(1, self.min_samples)} or more, got {self.max_samples}")

    def num_samples(self, client_id: int) -> int:
        """Return the number of samples of a client."""
        return self._num_samples(self._generator(client_id))

    def num_train(self, client_id: int) -> int:
        """Return the number of training samples of a client."""
        return self._num_train(self.num_samples(client_id))

    def train(self, client_id: int) -> tuple[Tensor, Tensor]:
        """Return the training inputs (float32) and labels (int64) of a client."""
        x, y = self._samples(client_id)
        return x[: self._num_train(len(y))].clone(), y[: self._num_train(len(y))].clone()

    def test(self, client_id: int) -> tuple[Tensor, Tensor]:
        """Return the test inputs and labels of a client."""
        x, y = self._samples(client_id)
        return x[self._num_train(len(y)) :].clone(), y[self._num_train(len(y)) :].clone()

    def model(self, client_id: int) -> tuple[Tensor, Tensor]:
        """Return W, of shape (60, 10), and b of the model that labels a client's samples."""
        rng = self._generator(client_id)
        # Drawn and dropped: in the random numbers of a client the number of samples comes before the model.
        self._num_samples(rng)
        weight, bias = self._model(rng)
        return torch.from_numpy(weight), torch.from_numpy(bias)

    def _generator(self, client_id: int) -> np.random.Generator:
        if client_id < 1:
            raise ConfigError(f"client {client_id}: ids count from 1")
        return np.random.default_rng((self.seed, client_id))

    def _num_samples(self, rng: np.random.Generator) -> int:
        number = self.min_samples + int(rng.lognormal(*self.log_size))
        return max(1, number if self.max_samples is None else min(number, self.max_samples))

    def _num_train(self, num_samples: int) -> int:
        return max(1, num_samples - round(num_samples * self.test_share))

    def _model(self, rng: np.random.Generator) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        if self.iid:
            # Ids count from 1, so 0 is the seed of the shared model.
            rng = np.random.default_rng((self.seed, 0))
        mean = 0.0 if self.iid else rng.normal(0, self.alpha)
        return rng.normal(mean, 1, (_FEATURES, _CLASSES)), rng.normal(mean, 1, _CLASSES)

    def _samples(self, client_id: int) -> tuple[Tensor, Tensor]:
        """Return all inputs and labels of a client, training and test samples together."""
        rng = self._generator(client_id)
        num_samples = self._num_samples(rng)
        weight, bias = self._model(rng)
        mean = np.zeros(_FEATURES) if self.iid else rng.normal(rng.normal(0, self.beta), 1, _FEATURES)
        x = mean + _SCALES * rng.standard_normal((num_samples, _FEATURES))
        y = (x @ weight + bias).argmax(axis=1)
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)
