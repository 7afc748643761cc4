"""History and loss tracker of a run, at plato's path."""

from dovetail.trainers.tracking import *  # noqa: F403 - every name of the module
