"""Data sources of a federation: the training and test data of each client, loaded on demand."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sized
from contextlib import suppress
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dovetail.data.batches import batch_length
from dovetail.data.datasets import LeafSynthetic, digits, fashion_mnist
from dovetail.data.loader import DataLoader
from dovetail.data.models import logistic, mlp
from dovetail.data.sources import as_loader, holds_samples
from dovetail.errors import ConfigError, DataError, UnknownNameError, expect
from dovetail.federated.data.label_counts import LabelCounts, count_labels, count_samples, some_clients
from dovetail.federated.data.partition import Partition, make_partition
from dovetail.federated.data.shrinking import shrunk
from dovetail.registry import Registry

# Columns of samples in memory, or samples that a dataset reads one by one.
_Rows: TypeAlias = "tuple[Tensor, ...] | Dataset[Any]"


class Datasource(ABC):
    """The training data of every client, and the test data of the server. Client ids count from 1.

    A worker process gets it once, pickled. `train_data` must be a function of the client id alone.

    Attributes:
        num_clients: The number of clients.
        knows_sizes: True if `num_samples` is fast, because it reads no data of the client. Set it to True if you
            override `num_samples` in this way, or if `train_data` returns data that are in memory.

    Example:
        >>> class Lines(Datasource):
        ...     num_clients = 3
        ...
        ...     def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        ...         x = torch.linspace(0, 1, 4).unsqueeze(1)
        ...         return x, client_id * x
        >>> Lines().num_samples(2), Lines().test_data(2)
        (4, None)
    """

    num_clients: int
    knows_sizes: bool = False
    _model: Callable[[], nn.Module] | None = None

    @abstractmethod
    def train_data(self, client_id: int) -> Any:
        """Return the training data of a client, in any form that `fit` takes."""

    def num_samples(self, client_id: int) -> int:
        """Return the number of training samples of a client; this default reads its data and counts them."""
        data = self.train_data(client_id)
        if isinstance(data, (tuple, Tensor, np.ndarray)):
            return batch_length(data)
        if isinstance(data, Sized) and holds_samples(data):
            return len(data)
        return sum(batch_length(batch) for batch in as_loader(data, batch_size=1))

    def test_data(self, client_id: int) -> Any | None:
        """Return the test data of a client. None means that it has none."""
        return None

    def central_test_data(self) -> Any | None:
        """Return the test data of the server. None means that it has none."""
        return None

    def label_counts(self) -> LabelCounts | None:
        """Return the number of training samples of each label at the clients, for a picture; None if it is unknown.

        This default counts samples only, and only if `knows_sizes` is set.
        """
        if not self.knows_sizes:
            return None
        return count_samples(self.num_clients, [self.num_samples(each) for each in some_clients(self.num_clients)])

    def default_model(self) -> nn.Module:
        """Return a new small model that fits these data; used if the user gives no model."""
        if self._model is None:
            raise ConfigError(f"{type(self).__name__} proposes no model: give one (model=…)")
        return self._model()


class PartitionedData(Datasource):
    """A dataset that is partitioned over clients.

    Args:
        dataset: Tensors or arrays, a tuple of them, or a dataset of torch. Clients get tensors of data in memory, and a
            `Subset` of any other dataset.
        partition: The samples of each client.
        test: The test data of the server, in the same forms.
        test_partition: Which samples of `test` each client has for its own tests.
        held_out: The share of its samples that each client uses for tests instead of training.
        model: Builds a model that fits these data.
        seed: The seed of the samples that are held out.
        keep: The number of clients, the last ones, whose tensors are cached.

    Example:
        >>> from dovetail.federated.data.partition import iid
        >>> data = PartitionedData((torch.arange(10.0), torch.zeros(10)), iid(10, 2), held_out=0.2)
        >>> data.num_samples(1), len(data.test_data(1)[0])
        (4, 1)
    """

    knows_sizes = True

    def __init__(
        self,
        dataset: Any,
        partition: Partition,
        *,
        test: Any = None,
        test_partition: Partition | None = None,
        held_out: float = 0.0,
        model: Callable[[], nn.Module] | None = None,
        seed: int = 0,
        keep: int = 32,
    ) -> None:
        expect(0 <= held_out < 1, "held_out", "a share from 0 to less than 1", held_out)
        if test_partition is not None:
            if test is None or held_out:
                raise ConfigError("test_partition: needs test data to cut, and held_out=0")
            if len(test_partition) != len(partition):
                raise ConfigError(f"test_partition: expected {len(partition)} clients, got {len(test_partition)}")
        self.num_clients = len(partition)
        self.partition = partition
        self.test_partition = test_partition
        self.held_out = held_out
        self.seed = seed
        self.keep = keep
        self._rows = _rows(dataset, partition)
        self._test = None if test is None else _rows(test, test_partition)
        self._model = model
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def train_data(self, client_id: int) -> Any:
        """Return a client's samples: a tuple of tensors, or a `Subset`."""
        if client_id in self._kept:
            self._kept.move_to_end(client_id)
            return self._kept[client_id]
        data = _chosen(self._rows, self._cut(client_id)[0])
        if isinstance(data, tuple) and self.keep:
            self._kept[client_id] = data
            if len(self._kept) > self.keep:
                self._kept.popitem(last=False)
        return data

    def num_samples(self, client_id: int) -> int:
        """Return the number of training samples of a client, without reading any."""
        size = len(self.partition.of(client_id))
        return size - self._num_held_out(size)

    def test_data(self, client_id: int) -> Any | None:
        """Return a client's share of the test data, or the samples that it held out; None if there are none."""
        if self.test_partition is None:
            rows, indices = self._rows, self._cut(client_id)[1]
        else:
            assert self._test is not None
            rows, indices = self._test, self.test_partition.of(client_id)
        return _chosen(rows, indices) if len(indices) else None

    def central_test_data(self) -> Any | None:
        return self._test

    def label_counts(self) -> LabelCounts | None:
        """Return the samples of each label at the clients, held-out ones too, if the labels are in memory."""
        labels = self._rows[-1] if isinstance(self._rows, tuple) else getattr(self._rows, "targets", None)
        if labels is not None:
            with suppress(DataError):
                return count_labels(self.partition, torch.as_tensor(labels))
        return super().label_counts()

    def __getstate__(self) -> dict[str, Any]:
        # Workers fill their own cache; the samples in this one would be sent a second time.
        return {**self.__dict__, "_kept": OrderedDict()}

    def _num_held_out(self, size: int) -> int:
        # At least one sample is left for training.
        return max(0, min(round(size * self.held_out), size - 1))

    def _cut(self, client_id: int) -> tuple[Tensor, Tensor]:
        indices = self.partition.of(client_id)
        count = self._num_held_out(len(indices))
        if not count:
            return indices, indices[:0]
        # The last number distinguishes these generators from the ones of overlapping partitions.
        order = torch.from_numpy(np.random.default_rng((self.seed, client_id, 1)).permutation(len(indices)))
        return indices[order[count:].sort().values], indices[order[:count].sort().values]


class GeneratedData(Datasource):
    """Data that are generated on demand and not stored, so that a million clients use no memory.

    Args:
        num_clients: Number of clients.
        make: Returns the training data of a client id, always the same. For worker processes it must be picklable.
        num_samples: Returns the number of training samples of a client id. None means to generate and count them.
        make_test: Returns the test data of a client id. None means no such data.
        make_central_test: Returns the test data of the server. None means no such data.
        model: Builds a model that fits these data.

    Example:
        >>> data = GeneratedData(1_000_000, lambda client_id: (torch.full((5, 2), float(client_id)), torch.zeros(5)))
        >>> data.train_data(999_999)[0][0], data.num_samples(1)
        (tensor([999999., 999999.]), 5)
    """

    def __init__(
        self,
        num_clients: int,
        make: Callable[[int], Any],
        *,
        num_samples: Callable[[int], int] | None = None,
        make_test: Callable[[int], Any] | None = None,
        make_central_test: Callable[[], Any] | None = None,
        model: Callable[[], nn.Module] | None = None,
    ) -> None:
        expect(num_clients >= 1, "num_clients", "1 or more", num_clients)
        self.num_clients = num_clients
        self._make = make
        self._num_samples = num_samples
        self.knows_sizes = num_samples is not None
        self._make_test = make_test
        self._make_central_test = make_central_test
        self._model = model

    def train_data(self, client_id: int) -> Any:
        return self._make(self._known(client_id))

    def num_samples(self, client_id: int) -> int:
        count = self._num_samples
        return super().num_samples(client_id) if count is None else count(self._known(client_id))

    def test_data(self, client_id: int) -> Any | None:
        return None if self._make_test is None else self._make_test(self._known(client_id))

    def central_test_data(self) -> Any | None:
        return None if self._make_central_test is None else self._make_central_test()

    def _known(self, client_id: int) -> int:
        if not 1 <= client_id <= self.num_clients:
            raise ConfigError(f"client {client_id}: the ids of these data go from 1 to {self.num_clients}")
        return client_id


def labels_of(dataset: Any) -> Tensor:
    """Return the labels of a dataset, which partitions use.

    They are the last tensor of a tuple or of a `TensorDataset`, the `targets` of a dataset as torchvision has them, and
    for any other dataset the last item of every sample, which means reading all of them.

    Example:
        >>> labels_of((torch.zeros(3, 2), torch.tensor([0, 1, 1])))
        tensor([0, 1, 1])
    """
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[torch.as_tensor(dataset.indices)]
    # Torchvision declares its labels on no common class, so asking is the only way.
    targets = getattr(dataset, "targets", None)
    if targets is not None:
        return torch.as_tensor(targets)
    rows = _rows(dataset)
    if isinstance(rows, tuple):
        return rows[-1]
    return torch.tensor([int(rows[index][-1]) for index in range(len(cast(Sized, rows)))])


def leaf_synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    num_clients: int = 100,
    seed: int = 0,
    *,
    num_central: int = 100,
    **options: Any,
) -> GeneratedData:
    """Return Synthetic(α, β) of the FedProx paper as the data of a federation; see `LeafSynthetic`.

    Args:
        alpha: How much models differ between clients.
        beta: How much inputs differ between clients.
        num_clients: Number of clients.
        seed: The seed of all random numbers.
        num_central: The server tests on the test data of this many clients, the first ones.
        options: Further arguments of `LeafSynthetic`.

    Example:
        >>> data = leaf_synthetic(0.5, 0.5, num_clients=1_000_000, seed=1)
        >>> data.train_data(1_000_000)[0].shape[1]
        60
    """
    source = LeafSynthetic(alpha, beta, seed, **_known_options(options))
    return GeneratedData(
        num_clients,
        source.train,
        num_samples=source.num_train,
        make_test=source.test,
        make_central_test=functools.partial(_together, source.test, min(num_central, num_clients)),
        model=functools.partial(logistic, 60, 10),
    )


def datasource(name: str, num_clients: int, **options: Any) -> Datasource:
    """Return the data of a federation by name.

    Args:
        name: One of `datasources`: `digits`, `fashion_mnist`, `synthetic`, or one that you registered.
        num_clients: Number of clients.
        options: The options of the data source. One that is partitioned takes `sampler` (the name of a partition,
            `iid` unless given) with its options, `seed`, `testset_sampler`, `testset_size`, `held_out`,
            `test_partition_size` (the test samples of a client) and `partition_distribution` (the share of its samples
            that a client keeps, such as `{"distribution": "uniform", "low": 0.4, "high": 1.0}`); Fashion-MNIST takes
            `folder` as well. `synthetic` takes what `leaf_synthetic` takes.

    Example:
        >>> data = datasource("digits", 10, sampler="dirichlet", alpha=0.3)
        >>> sum(data.num_samples(client_id) for client_id in range(1, 11))
        1438
    """
    return datasources.get(name)(num_clients, **options)


def _digits(num_clients: int, **options: Any) -> Datasource:
    # The test data do not depend on the seed of the partition, so that results of several seeds can be compared.
    train, test = digits((0.8, 0.2))
    return partition_data(train, test, functools.partial(mlp, 64, 10), num_clients, **options)


def _fashion_mnist(num_clients: int, *, folder: str | os.PathLike[str] | None = None, **options: Any) -> Datasource:
    train, test = fashion_mnist(folder)
    features = train.tensors[0][:1].numel()
    return partition_data(train, test, functools.partial(mlp, features, 10), num_clients, **options)


def _synthetic(num_clients: int, *, sampler: str | None = None, **options: Any) -> Datasource:
    if sampler is not None:
        raise ConfigError(
            f"sampler: synthetic data is created per client and not partitioned: expected None, got {sampler!r}"
        )
    return leaf_synthetic(num_clients=num_clients, **options)


datasources: Registry[Callable[..., Datasource]] = Registry(
    "datasource",
    lambda: {
        "digits": _digits,
        "fashion_mnist": _fashion_mnist,
        "FashionMNIST": _fashion_mnist,
        "synthetic": _synthetic,
    },
)


def partition_data(
    train: Dataset[Any],
    test: Dataset[Any] | None,
    model: Callable[[], nn.Module] | None,
    num_clients: int,
    *,
    sampler: str | None = None,
    testset_sampler: str | None = None,
    testset_size: int | None = None,
    test_partition_size: int | None = None,
    partition_distribution: Mapping[str, Any] | None = None,
    held_out: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> PartitionedData:
    """Return a training set and a test set, cut over clients by the names of partitions.

    `datasource` explains the options. None for `model` means that the data propose no model.
    """
    if testset_size is not None:
        rows = () if test is None else _rows(test)
        num_tests = 0 if test is None else len(cast(Sized, test))
        expect(1 <= testset_size <= num_tests, "testset_size", f"1 to {num_tests}", testset_size)
        drawn = torch.randperm(num_tests, generator=torch.Generator().manual_seed(seed))[:testset_size].sort().values
        chosen = _chosen(rows, drawn)
        test = TensorDataset(*chosen) if isinstance(chosen, tuple) else chosen
    partition = make_partition(sampler or "iid", labels_of(train), num_clients, seed=seed, **options)
    if partition_distribution is not None:
        partition = shrunk(partition, partition_distribution, seed)
    test_partition = None
    if testset_sampler is not None:
        sizes = {} if test_partition_size is None else {"partition_size": test_partition_size}
        test_partition = make_partition(testset_sampler, labels_of(test), num_clients, seed=seed, **sizes)
    elif test_partition_size is not None:
        raise ConfigError("test_partition_size: has no effect without testset_sampler; give both")
    return PartitionedData(
        train,
        partition,
        test=test,
        test_partition=test_partition,
        held_out=held_out,
        model=model,
        seed=seed,
    )


def _known_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    known = set(LeafSynthetic.__dataclass_fields__)
    for option in options:
        if option not in known:
            raise UnknownNameError("option of synthetic data", option, known)
    return options


def _together(make: Callable[[int], tuple[Tensor, ...]], num_clients: int) -> tuple[Tensor, ...]:
    parts = [make(client_id) for client_id in range(1, num_clients + 1)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _rows(data: Any, partition: Partition | None = None) -> _Rows:
    loader = as_loader(data, batch_size=1)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise DataError(f"dataset: expected samples that have indices, got {type(data).__name__}")
    dataset = loader.dataset
    rows = dataset.tensors if type(dataset) is TensorDataset else dataset
    count = len(cast(Sized, dataset))
    if partition is not None and len(partition.indices):
        low, high = int(partition.indices.min()), int(partition.indices.max())
        if low < 0 or high >= count:
            raise DataError(f"partition: expected samples from 0 to {count - 1}, got {low if low < 0 else high}")
    return rows


def _chosen(rows: _Rows, indices: Tensor) -> Any:
    if isinstance(rows, tuple):
        return tuple(column.index_select(0, indices) for column in rows)
    return Subset(rows, indices.tolist())
