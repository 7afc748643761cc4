"""plato's `samplers.base`: the samples of one client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch.utils.data import SubsetRandomSampler

from dovetail.errors import ConfigError
from dovetail.federated.data.partition import make_partition
from dovetail.federated.data.sources import labels_of

__all__ = ["PartitionSampler", "Sampler"]


class Sampler:
    """The samples of one client; a trainer takes it wherever it takes a sampler.

    Args:
        samples: The indices of the samples.

    Example:
        >>> Sampler([3, 4, 5]).num_samples()
        3
    """

    def __init__(self, samples: Sequence[int] = ()) -> None:
        self.data_samples = samples

    def get(self) -> SubsetRandomSampler:
        """Return a sampler for torch, which draws the samples in random order."""
        return SubsetRandomSampler(self.data_samples)

    def num_samples(self) -> int:
        """Return the number of samples."""
        return len(self.data_samples)


class PartitionSampler(Sampler):
    """The samples that a partition gives to one client.

    Args:
        datasource: A data source of plato.
        client_id: The client, counted from 1.
        testing: True for the samples of the test set.
        num_clients: The number of clients, which plato reads from its global settings.
        options: Options of the partition, such as `partition_size` or `concentration`, as plato spells them.

    Raises:
        ConfigError: `num_clients` is missing, or an option is wrong.
    """

    partition: ClassVar[str]

    def __init__(
        self,
        datasource: Any,
        client_id: int,
        testing: bool = False,
        *,
        num_clients: int | None = None,
        **options: Any,
    ) -> None:
        # In plato, a global `Config()` has the number.
        if num_clients is None:
            raise ConfigError(f"samplers.{self.partition}: give num_clients: there are no global settings to read")
        data = datasource.get_test_set() if testing else datasource.get_train_set()
        partition = make_partition(self.partition, labels_of(data), num_clients, **options)
        super().__init__(partition.of(client_id).tolist())
