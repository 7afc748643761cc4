"""History of a run: its metrics, one row per event, in memory and as lines of a file.

This package does not import torch, so that a history can be read, compared and drawn without it.
"""

from dovetail.history.lines import Row
from dovetail.history.metrics import LossTracker, Mode, RunHistory, mode_of
from dovetail.history.run import History

__all__ = ["History", "LossTracker", "Mode", "Row", "RunHistory", "mode_of"]
