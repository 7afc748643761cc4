"""Testing strategies, at plato's path."""

from dovetail.trainers.strategies.testing import *  # noqa: F403 - the names are those of the module
