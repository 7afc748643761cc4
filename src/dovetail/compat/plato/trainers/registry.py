"""Trainers by name, at plato's path."""

from dovetail.trainers.registry import *  # noqa: F403 - the names are those of the module
