"""Data loader strategies, at plato's path."""

from dovetail.trainers.strategies.data_loader import *  # noqa: F403 - every name of the module
