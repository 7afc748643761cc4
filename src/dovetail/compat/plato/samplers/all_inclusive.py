"""plato's `samplers.all_inclusive`: all samples of a data source."""

from __future__ import annotations

from dovetail.compat.plato.datasources.base import DataSource
from dovetail.compat.plato.samplers import base

__all__ = ["Sampler"]


class Sampler(base.Sampler):
    """All training or test samples of a data source.

    Args:
        datasource: The data source.
        client_id: Without effect, because every client has all samples.
        testing: True for the samples of the test set.
    """

    def __init__(self, datasource: DataSource, client_id: int = 0, testing: bool = False) -> None:
        data = datasource.get_test_set() if testing else datasource.get_train_set()
        super().__init__(range(len(data)))
