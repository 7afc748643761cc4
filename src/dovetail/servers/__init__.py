"""Servers: who makes one model of many."""

from __future__ import annotations

from dovetail.servers import fedavg
from dovetail.servers.fedavg import Server

__all__ = ["Server", "fedavg"]
