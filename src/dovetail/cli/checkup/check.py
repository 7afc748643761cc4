"""What was looked at on this machine, and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        part: What it belongs to: `"python"`, `"torch"`, `"extras"`, `"files"` or `"experiments"`.
        name: What it is.
        status: `"problem"` if something essential does not work, `"note"` if something is missing that may never be
            needed, else `"ok"`.
        found: What was found, in plain words.
        remedy: The command that installs or repairs it, or empty.
    """

    part: str
    name: str
    status: Status
    found: str
    remedy: str = ""


def shortened(text: str, length: int = 200) -> str:
    """Return the first line of a message, as much of it as people read."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= length else f"{first[:length]}…"
