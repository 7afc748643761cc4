"""Federated algorithms, one file each."""

from __future__ import annotations

from dovetail.algorithms.base import Algorithm
from dovetail.algorithms.fedasync import FedAsync
from dovetail.algorithms.fedavg import FedAvg
from dovetail.algorithms.fedbuff import FedBuff
from dovetail.algorithms.registry import algorithms

__all__ = ["Algorithm", "FedAsync", "FedAvg", "FedBuff", "algorithms"]
