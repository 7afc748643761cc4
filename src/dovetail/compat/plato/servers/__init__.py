"""plato's servers, at the paths from which its users import them."""

from dovetail.compat.plato.servers.fedavg import Server

__all__ = ["Server"]
