"""What a trial reports, read while it is being written.

The lines of `metrics.jsonl` are those that `core.train` describes; that module needs torch, and whoever only watches
trials does not.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["METRICS", "Reports", "number"]

METRICS = "metrics.jsonl"
"""The name of the file in the folder of a trial."""

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Reports:
    r"""The lines that a file has got since it was last read.

    Args:
        path: The file, which need not be there yet.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / METRICS
        >>> reports = Reports(path)
        >>> list(reports.read())
        []
        >>> _ = path.write_text('{"progress": 0.5}\n{"progress": 0.7')
        >>> list(reports.read())
        [{'progress': 0.5}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Return the reports whose lines have been finished since the last time; what is no report is passed over."""
        try:
            # One look at the size first: most of the time there is nothing new.
            if (size := os.stat(self.path).st_size) == self._at:
                return
            with open(self.path, "rb") as file:
                # Somebody has begun it anew.
                if size < self._at:
                    self._at = 0
                file.seek(self._at)
                *lines, _ = file.read().split(b"\n")
        except FileNotFoundError:
            return
        for line in lines:
            self._at += len(line) + 1
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def number(values: Mapping[str, Any], name: str) -> float | None:
    """Return a metric as a number; None where there is none.

    Example:
        >>> number({"loss": 0.5}, "loss"), number({"loss": "Infinity"}, "loss"), number({"loss": [1]}, "loss")
        (0.5, inf, None)
    """
    value = values.get(name)
    if isinstance(value, str):
        return _SPELLED.get(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
