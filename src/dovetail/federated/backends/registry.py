"""Registry of backends by name; a backend imports heavy packages only when it starts."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.federated.backends.actors import Ray
from dovetail.federated.backends.auto import Auto
from dovetail.federated.backends.base import Backend
from dovetail.federated.backends.processes import Process
from dovetail.federated.backends.sequential import Sequential
from dovetail.federated.backends.vectorized import Vectorized
from dovetail.registry import Registry

backends: Registry[Callable[..., Backend]] = Registry(
    "backend",
    lambda: {"auto": Auto, "process": Process, "ray": Ray, "sequential": Sequential, "vectorized": Vectorized},
)
