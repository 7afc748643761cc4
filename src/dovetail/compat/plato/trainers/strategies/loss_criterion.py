"""Loss strategies, at plato's path."""

from dovetail.trainers.strategies.loss_criterion import *  # noqa: F403 - every name of the module
