"""History and loss tracker of a run, at plato's path."""

from dovetail.trainers.tracking import *  # noqa: F403 - the names are those of the module
