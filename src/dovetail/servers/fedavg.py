"""Federated averaging server: the public import path of `dovetail.federated.servers.fedavg`."""

from __future__ import annotations

from dovetail.federated.servers.fedavg import Server

__all__ = ["Server"]
