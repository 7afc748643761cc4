"""zae-engine's names: a trainer with `run` and `inference`, and the add-ons."""

from dovetail.compat.zae_engine.trainer import ProgressChecker, Trainer

__all__ = ["ProgressChecker", "Trainer"]
