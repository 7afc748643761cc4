"""plato's algorithms, at the paths from which its users import them."""

from dovetail.compat.plato.algorithms.fedavg import Algorithm

__all__ = ["Algorithm"]
