"""Federated servers: the public import path of `dovetail.federated.servers`."""

from __future__ import annotations

from dovetail.federated.servers import Server
from dovetail.servers import fedavg

__all__ = ["Server", "fedavg"]
