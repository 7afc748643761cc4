"""Algorithms by name, for configurations."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.algorithms.base import Algorithm
from dovetail.algorithms.fedasync import FedAsync
from dovetail.algorithms.fedavg import FedAvg
from dovetail.algorithms.fedbuff import FedBuff
from dovetail.registry import Registry

__all__ = ["algorithms"]

algorithms: Registry[Callable[..., Algorithm]] = Registry(
    "algorithm", lambda: {"fedavg": FedAvg, "fedasync": FedAsync, "fedbuff": FedBuff}
)
