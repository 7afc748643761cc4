"""Result of one check of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        part: The group of the check: `"python"`, `"torch"`, `"extras"`, `"files"` or `"experiments"`.
        name: The name of the checked item.
        status: `"problem"` if something essential does not work, `"note"` if something is missing that may never be
            needed, else `"ok"`.
        found: The result, in plain words.
        remedy: The command that installs or repairs it, or empty.
    """

    part: str
    name: str
    status: Status
    found: str
    remedy: str = ""


def shortened(text: str, length: int = 200) -> str:
    """Return the first line of a message, cut to a length."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= length else f"{first[:length]}…"
