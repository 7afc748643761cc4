"""plato's `callbacks.client`: callbacks of a client."""

from dovetail.federated.callbacks import ClientCallback

__all__ = ["ClientCallback"]
