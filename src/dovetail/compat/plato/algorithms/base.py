"""plato's `algorithms.base`: the base class of algorithms."""

from dovetail.compat.plato.algorithms.fedavg import Algorithm

__all__ = ["Algorithm"]
