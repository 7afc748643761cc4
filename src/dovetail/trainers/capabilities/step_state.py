"""State of one process in a step of data-parallel training."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from dovetail.trainers.capabilities.idle import IdleBatch, IdleWindow


class StepState:
    """State of this process in the running step."""

    __slots__ = (
        "agreed",
        "before",
        "ends",
        "extras",
        "idle",
        "is_alike",
        "is_empty",
        "own",
        "samples",
        "tokens",
        "was_idle",
    )

    def __init__(self) -> None:
        # True if parameters outside of the model were copied from the first process.
        self.is_alike = False
        # The steps of an epoch, if all processes reported the same number.
        self.agreed: int | None = None
        # The steps of each process, if these numbers are known and differ.
        self.ends: Sequence[int | None] = ()
        # Number of steps for which this process has batches.
        self.own: float = inf
        # Samples of the batches of the running accumulation window before this one.
        self.samples = 0
        # Tokens of these batches, and of a last batch whose tokens were returned after its gradients were sent.
        self.tokens: Any = 0
        # Gradients and items of the running window, if this process has batches for only a part of it.
        self.idle: IdleWindow | None = None
        # True if this process has no batches for the running window.
        self.is_empty = False
        # The RNG state and the buffers before an idle batch.
        self.before: IdleBatch | None = None
        # True if the last batch of the epoch was idle, and the buffers were not copied since.
        self.was_idle = False
        # Sums of the numbers that were sent with the first gradients of the running step.
        self.extras: list[Any] | None = None
