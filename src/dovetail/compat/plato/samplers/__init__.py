"""plato's samplers, at the paths from which its users import them."""

from dovetail.compat.plato.samplers.base import Sampler

__all__ = ["Sampler"]
