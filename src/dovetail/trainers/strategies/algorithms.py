"""Strategies of algorithms, at the path from which plato's users import them."""

from dovetail.compat.plato.trainers.strategies.algorithms import *  # noqa: F403
from dovetail.compat.plato.trainers.strategies.algorithms import __all__ as __all__
