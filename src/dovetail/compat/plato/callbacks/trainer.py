"""Callback of a trainer, at plato's path."""

from dovetail.callbacks.trainer import *  # noqa: F403 - the names are those of the module
