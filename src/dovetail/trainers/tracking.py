"""History and loss tracker of a run, at the path from which plato's users import them."""

from dovetail.history import LossTracker, RunHistory

__all__ = ["LossTracker", "RunHistory"]
