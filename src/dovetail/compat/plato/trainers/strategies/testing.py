"""Testing strategies, at plato's path."""

from dovetail.trainers.strategies.testing import *  # noqa: F403 - every name of the module
