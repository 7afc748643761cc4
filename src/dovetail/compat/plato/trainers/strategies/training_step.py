"""Step strategies, at plato's path."""

from dovetail.trainers.strategies.training_step import *  # noqa: F403 - every name of the module
