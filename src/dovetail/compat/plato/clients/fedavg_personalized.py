"""plato's `clients.fedavg_personalized`: the plain client, because the algorithm decides which layers stay with it."""

from dovetail.compat.plato.clients.simple import Client

__all__ = ["Client"]
