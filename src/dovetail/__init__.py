"""Dovetail: a PyTorch trainer whose pieces fit together at run time.

Importing this package is fast: torch is imported when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dovetail.errors import InvalidHP
from dovetail.info import ClusterInfo, TrialInfo, get_cluster_info
from dovetail.units import Batch, Batches, Epoch, Epochs, Progress, Record, Records, Token, Tokens, Update, Updates

if TYPE_CHECKING:
    from dovetail.data import DataLoader
    from dovetail.history import History
    from dovetail.pytorch.context import TrialContext
    from dovetail.trainers import SingleProcess, Trainer, TrainingContext, seed_everything

__version__ = "0.2.0"

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"
"""A format for `logging.basicConfig` with the level, the process and the logger of each record."""

__all__ = [
    "LOG_FORMAT",
    "Batch",
    "Batches",
    "ClusterInfo",
    "DataLoader",
    "Epoch",
    "Epochs",
    "History",
    "InvalidHP",
    "Progress",
    "Record",
    "Records",
    "SingleProcess",
    "Token",
    "Tokens",
    "Trainer",
    "TrainingContext",
    "TrialContext",
    "TrialInfo",
    "Update",
    "Updates",
    "__version__",
    "get_cluster_info",
    "seed_everything",
]

# The module of each name that `__getattr__` imports when the name is first used.
_HOMES = {
    "DataLoader": "dovetail.data",
    "History": "dovetail.history",
    "SingleProcess": "dovetail.trainers",
    "Trainer": "dovetail.trainers",
    "TrainingContext": "dovetail.trainers",
    "TrialContext": "dovetail.pytorch.context",
    "seed_everything": "dovetail.trainers",
}
# Packages that are attributes after `import dovetail` alone.
_PACKAGES = ("callbacks", "checkpoint", "core", "data", "history", "pytorch", "trainers")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"dovetail.{name}")
    raise AttributeError(f"module 'dovetail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
