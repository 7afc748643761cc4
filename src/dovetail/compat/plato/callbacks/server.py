"""plato's `callbacks.server`: callbacks of a server."""

from dovetail.federated.callbacks import ServerCallback

__all__ = ["ServerCallback"]
