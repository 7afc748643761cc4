"""Trainers by name, at plato's path."""

from dovetail.trainers.registry import *  # noqa: F403 - every name of the module
