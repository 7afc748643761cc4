"""plato's clients, at the paths from which its users import them."""

from dovetail.compat.plato.clients.simple import Client

__all__ = ["Client"]
