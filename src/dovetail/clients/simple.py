"""Default client: the public import path of `dovetail.federated.clients.simple`."""

from __future__ import annotations

from dovetail.federated.clients.simple import Client

__all__ = ["Client"]
