"""Optimizer strategies, at plato's path."""

from dovetail.trainers.strategies.optimizer import *  # noqa: F403 - every name of the module
