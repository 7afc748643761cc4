"""Servers: who makes one model of many."""

from __future__ import annotations

from dovetail.federated.servers import fedavg
from dovetail.federated.servers.fedavg import Server

__all__ = ["Server", "fedavg"]
