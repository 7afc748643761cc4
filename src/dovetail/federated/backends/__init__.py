"""Backends of a federation: they decide where clients run."""

from __future__ import annotations

from dovetail.federated.backends.actors import Ray
from dovetail.federated.backends.auto import Auto
from dovetail.federated.backends.base import Backend, CostEstimator, Done, Outcome, Work, Worker
from dovetail.federated.backends.pool import WorkerError
from dovetail.federated.backends.processes import Process
from dovetail.federated.backends.registry import backends
from dovetail.federated.backends.sequential import Sequential
from dovetail.federated.backends.vectorized import Vectorized

__all__ = [
    "Auto",
    "Backend",
    "CostEstimator",
    "Done",
    "Outcome",
    "Process",
    "Ray",
    "Sequential",
    "Vectorized",
    "Work",
    "Worker",
    "WorkerError",
    "backends",
]
