"""Demos of `dovetail demo`: small runs of at most a minute that write figures, reports or checkpoints."""

from __future__ import annotations

from dovetail.demos.catalogue import DEMOS, Demo, Outcome

__all__ = ["DEMOS", "Demo", "Outcome"]
