"""plato's processors, at the paths from which its users import them."""

from dovetail.compat.plato.processors.base import Processor

__all__ = ["Processor"]
