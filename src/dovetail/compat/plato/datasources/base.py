"""plato's `datasources.base`: one training set and one test set, which a server cuts over its clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.federated.config import FederatedConfig
from dovetail.federated.data.sources import Datasource, partition_data

__all__ = ["DataSource"]


class DataSource:
    """Base class of plato's data sources: set `trainset` and `testset`, or override the methods that return them."""

    def __init__(self) -> None:
        self.trainset: Any = None
        self.testset: Any = None

    def num_train_examples(self) -> int:
        """Return the number of training samples."""
        return len(self.get_train_set())

    def num_test_examples(self) -> int:
        """Return the number of test samples."""
        return len(self.get_test_set())

    def classes(self) -> list[Any]:
        """Return the names of the classes."""
        return list(self.get_train_set().classes)

    def targets(self) -> Sequence[Any]:
        """Return the label of every training sample."""
        targets: Sequence[Any] = self.get_train_set().targets
        return targets

    def get_train_set(self) -> Any:
        """Return the training data of all clients."""
        return self.trainset

    def get_test_set(self) -> Any:
        """Return the test data."""
        return self.testset


def partitioned(source: Any, config: FederatedConfig) -> Any:
    """Return the data of plato's source, cut over the clients by the settings of `data`; others as they are.

    Args:
        source: A data source, or a class that makes one.
        config: The settings.

    Example:
        >>> import torch
        >>> class Numbers(DataSource):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.trainset = torch.utils.data.TensorDataset(torch.arange(8.0), torch.arange(8) % 2)
        >>> partitioned(Numbers, FederatedConfig().with_settings(total_clients=4)).num_samples(1)
        2
    """
    # plato's users give the class; a data source of ours may be callable itself.
    made = source() if callable(source) and not isinstance(source, Datasource) else source
    if not isinstance(made, DataSource):
        return made
    data = config.data
    return partition_data(
        made.get_train_set(),
        made.get_test_set(),
        None,
        config.clients.total_clients,
        sampler=data.sampler,
        testset_sampler=data.testset_sampler,
        testset_size=data.testset_size,
        seed=data.random_seed,
        **dict(data.options),
    )
