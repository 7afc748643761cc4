"""What `dovetail demo` shows: small runs, a minute or less each, that leave something to look at."""

from __future__ import annotations

from dovetail.demos.catalogue import DEMOS, Demo, Outcome

__all__ = ["DEMOS", "Demo", "Outcome"]
