"""Personalization rounds, which come after all rounds of a federation."""

from __future__ import annotations

import math

from dovetail.trainers.context import TrainingContext

__all__ = ["personalizes"]


def personalizes(context: TrainingContext) -> bool:
    """Return whether the running round comes after all rounds: clients train for themselves, and nothing is sent.

    Example:
        >>> from dovetail.trainers import TrainingContext
        >>> context = TrainingContext()
        >>> context.config["rounds"], context.client.round = 3, 4
        >>> personalizes(context)
        True
    """
    return context.client.round > float(context.config.get("rounds", math.inf))
