"""Loss strategies, at plato's path."""

from dovetail.trainers.strategies.loss_criterion import *  # noqa: F403 - the names are those of the module
