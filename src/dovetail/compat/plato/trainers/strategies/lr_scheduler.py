"""Learning-rate strategies, at plato's path."""

from dovetail.trainers.strategies.lr_scheduler import *  # noqa: F403 - the names are those of the module
