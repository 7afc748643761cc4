"""Federated learning: servers, clients, algorithms, and the backends that run clients."""

from __future__ import annotations

from dovetail.federated.callbacks import ClientCallback, ServerCallback
from dovetail.federated.config import FederatedConfig
from dovetail.federated.messages import Fault, Task, Update, WeightedSum, Weights

__all__ = ["ClientCallback", "Fault", "FederatedConfig", "ServerCallback", "Task", "Update", "WeightedSum", "Weights"]
