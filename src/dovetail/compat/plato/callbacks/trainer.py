"""Callback of a trainer, at plato's path."""

from dovetail.callbacks.trainer import *  # noqa: F403 - every name of the module
