"""Clients: who trains."""

from __future__ import annotations

from dovetail.clients import simple
from dovetail.clients.simple import Client

__all__ = ["Client", "simple"]
