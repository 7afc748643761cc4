"""Clients of a federation."""

from __future__ import annotations

from dovetail.federated.clients import simple
from dovetail.federated.clients.simple import Client

__all__ = ["Client", "simple"]
