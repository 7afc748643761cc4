"""The kinds of strategy and their context, at plato's path."""

from dovetail.trainers.strategies.base import *  # noqa: F403 - every name of the module
