"""plato's `clients.base`: the base class of clients."""

from dovetail.compat.plato.clients.simple import Client

__all__ = ["Client"]
