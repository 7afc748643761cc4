"""All general strategies, at plato's path."""

from dovetail.trainers.strategies import *  # noqa: F403 - every name of the module
