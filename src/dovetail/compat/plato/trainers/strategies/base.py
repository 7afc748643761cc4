"""The kinds of strategy and their context, at plato's path."""

from dovetail.trainers.strategies.base import *  # noqa: F403 - the names are those of the module
