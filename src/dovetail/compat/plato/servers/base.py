"""plato's `servers.base`: the base class of servers."""

from dovetail.compat.plato.servers.fedavg import Server

__all__ = ["Server"]
