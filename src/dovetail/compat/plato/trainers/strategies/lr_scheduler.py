"""Learning-rate strategies, at plato's path."""

from dovetail.trainers.strategies.lr_scheduler import *  # noqa: F403 - every name of the module
