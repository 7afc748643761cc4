"""How much an update counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dovetail.errors import UnknownNameError, expect
from dovetail.federated.messages import Update
from dovetail.federated.postprocess.base import EVERYONE, Gathering, Postprocessor, Upload

__all__ = ["Weighting"]


@dataclass(frozen=True)
class Weighting(Postprocessor):
    """Let an update count by something else than its samples. What it counts stands in `num_samples`.

    The server makes sure of `"uniform"` and of the cap itself; a function is the client's word.

    Args:
        rule: `"samples"`, `"uniform"` for 1 each that has any, or a function of the update that returns a whole number.
            Only the proportions matter.
        cap: The most that one client can count.

    Example:
        >>> from dovetail.federated.messages import Task
        >>> upload = Upload(Task(1, 1, {}), seed=0, state={})
        >>> Weighting("uniform").encode(Update(1, 1, num_samples=600), upload).num_samples
        1
        >>> Weighting(cap=100).encode(Update(1, 1, num_samples=600), upload).num_samples
        100
    """

    rule: Literal["samples", "uniform"] | Callable[[Update], int] = "samples"
    cap: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.rule) and self.rule not in ("samples", "uniform"):
            raise UnknownNameError("weighting", str(self.rule), ("samples", "uniform"))
        expect(self.cap is None or self.cap >= 1, "cap", "a whole number of at least 1", self.cap)

    def encode(self, update: Update, upload: Upload) -> Update:
        return self._capped(update, self.rule(update) if callable(self.rule) else update.num_samples)

    def decode(self, update: Update, gathering: Gathering) -> Update:
        """Count the update by what the server can know of the rule."""
        return update if update.client_id == EVERYONE else self._capped(update, update.num_samples)

    def _capped(self, update: Update, weight: int) -> Update:
        if self.rule == "uniform":
            weight = min(weight, 1)
        return replace(update, num_samples=weight if self.cap is None else min(weight, self.cap))
