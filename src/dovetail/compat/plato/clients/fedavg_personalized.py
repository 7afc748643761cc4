"""plato's `clients.fedavg_personalized`: the layers that stay with a client are the algorithm's, as in every client."""

from dovetail.compat.plato.clients.simple import Client

__all__ = ["Client"]
