"""Servers of a federation: they send tasks to clients and aggregate the answers."""

from __future__ import annotations

from dovetail.federated.servers import fedavg
from dovetail.federated.servers.fedavg import Server

__all__ = ["Server", "fedavg"]
