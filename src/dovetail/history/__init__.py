"""What a run has measured: its metrics, event by event, in memory and as lines of a file.

This package starts without torch: a history is read, compared and drawn where no model is.
"""

from dovetail.history.lines import Row
from dovetail.history.metrics import LossTracker, Mode, RunHistory, mode_of
from dovetail.history.run import History

__all__ = ["History", "LossTracker", "Mode", "Row", "RunHistory", "mode_of"]
