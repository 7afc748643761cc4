"""Data loader strategies, at plato's path."""

from dovetail.trainers.strategies.data_loader import *  # noqa: F403 - the names are those of the module
