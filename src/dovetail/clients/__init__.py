"""Federated clients: the public import path of `dovetail.federated.clients`."""

from __future__ import annotations

from dovetail.clients import simple
from dovetail.federated.clients import Client

__all__ = ["Client", "simple"]
