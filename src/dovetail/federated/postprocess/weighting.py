"""Weighting of updates: the weight of each client in the mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dovetail.errors import UnknownNameError, expect
from dovetail.federated.messages import Update
from dovetail.federated.postprocess.base import EVERYONE, Gathering, Postprocessor, Upload


@dataclass(frozen=True)
class Weighting(Postprocessor):
    """Replaces the weight of an update, which is its `num_samples`.

    The server enforces `"uniform"` and the cap; it cannot check a function.

    Args:
        rule: `"samples"`, `"uniform"` for 1 per client with samples, or a function of the update that returns a whole
            number. Only proportions matter.
        cap: The largest weight of a client.

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
        """Apply the part of the rule that the server can check."""
        return update if update.client_id == EVERYONE else self._capped(update, update.num_samples)

    def _capped(self, update: Update, weight: int) -> Update:
        if self.rule == "uniform":
            weight = min(weight, 1)
        return replace(update, num_samples=weight if self.cap is None else min(weight, self.cap))
