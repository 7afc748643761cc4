"""List of callbacks, at plato's path."""

from dovetail.callbacks.handler import *  # noqa: F403 - every name of the module
