"""Update strategies, at plato's path."""

from dovetail.trainers.strategies.model_update import *  # noqa: F403 - every name of the module
