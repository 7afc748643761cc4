"""Trainer and add-ons with zae-engine's names."""

from dovetail.compat.zae_engine.trainer import ProgressChecker, Trainer

__all__ = ["ProgressChecker", "Trainer"]
