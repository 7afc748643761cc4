"""List of callbacks, at plato's path."""

from dovetail.callbacks.handler import *  # noqa: F403 - the names are those of the module
