"""Reader of the reports that a trial writes, while the trial is writing them.

The format of `metrics.jsonl` is described in `core.train`. That module needs torch, but this reader does not. Every
line is checked: a trial may write any bytes, and the runner must not fail.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

METRICS = "metrics.jsonl"
"""The name of the file in the folder of a trial."""

LARGEST_STEP = 2**31 - 1
"""The largest number of batches that every database stores."""

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_KEYS = ("group", "progress", "status", "exited", "alert", "metadata")
_DEEPEST = 32
_LONGEST_LINE = 16 << 20
_LARGEST_INTEGER = 2**63 - 1


class RejectedLine(NamedTuple):
    """A line of the file that is not a report.

    Attributes:
        number: The number of the line, from 1.
        end: The position after the line in the file, in bytes.
        reason: A sentence that explains the rejection.
    """

    number: int
    end: int
    reason: str


class Reports:
    r"""Reader of the new lines of a file since the last read.

    Attributes:
        rejected: The lines of the last `read` that were not reports.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / METRICS
        >>> reports = Reports(path)
        >>> list(reports.read())
        []
        >>> _ = path.write_text('{"progress": 0.5}\n[]\n{"progress": 0.7')
        >>> list(reports.read()), [line.reason for line in reports.rejected]
        ([{'progress': 0.5}], ['expected an object, got list'])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rejected: list[RejectedLine] = []
        self._at = 0
        self._line = 0
        self._is_inside_long_line = False

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the reports whose lines were completed since the last call.

        Raises:
            OSError: The file cannot be read, or is not a regular file.
        """
        self.rejected = []
        try:
            found = os.stat(self.path, follow_symlinks=False)
            size = found.st_size
            # Usually there is nothing new.
            if size == self._at and stat.S_ISREG(found.st_mode):
                return
            # A FIFO would block the runner without O_NONBLOCK.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self.path))
            if size < self._at:
                # The trial has truncated the file.
                self._at, self._line, self._is_inside_long_line = 0, 0, False
            file.seek(self._at)
            while chunk := file.read(_LONGEST_LINE):
                # `rest` is an incomplete line, which is read again with the next chunk or call.
                *lines, rest = chunk.split(b"\n")
                for line in lines:
                    self._at += len(line) + 1
                    if (row := self._parsed(line)) is not None:
                        yield row
                if not lines and len(chunk) == _LONGEST_LINE:
                    # Skip it without storing it: a line without an end would fill the memory.
                    self._at += len(rest)
                    self._is_inside_long_line = True
                elif len(chunk) < _LONGEST_LINE:
                    return
                file.seek(self._at)

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        self._line += 1
        try:
            if self._is_inside_long_line:
                self._is_inside_long_line = False
                raise ValueError(f"longer than {_LONGEST_LINE:,} bytes")
            return parse_report(line) if line.strip() else None
        except ValueError as error:
            self.rejected.append(RejectedLine(self._line, self._at, str(error)))
            return None


def parse_report(line: bytes) -> dict[str, Any]:
    """Return the report of one line.

    Raises:
        ValueError: The line is not a report; the message is one sentence without the content of the line.

    Example:
        >>> parse_report(b'{"group": "validation", "steps_completed": 3, "metrics": {"loss": 0.5}}')["steps_completed"]
        3
    """
    try:
        row = json.loads(line.decode("utf-8"), parse_int=_integer, parse_constant=_constant)
    except RecursionError:
        raise ValueError(f"nested more than {_DEEPEST} levels deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("not valid UTF-8") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    _check_content(row)
    if not any(key in row for key in _KEYS):
        raise ValueError(f"expected a report with one of {', '.join(_KEYS)}")
    _check_fields(row)
    return row


def number(values: Mapping[str, Any], name: str) -> float | None:
    """Return a metric as a number; None if it is not a number.

    Example:
        >>> number({"loss": 0.5}, "loss"), number({"loss": "Infinity"}, "loss"), number({"loss": [1]}, "loss")
        (0.5, inf, None)
    """
    value = values.get(name)
    if isinstance(value, str):
        return _SPELLED.get(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def shortened(text: str, length: int) -> str:
    """Return a text cut to a number of characters.

    Example:
        >>> shortened("downloading", 11), shortened("downloading", 5)
        ('downloading', 'down…')
    """
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _check_content(row: dict[str, Any]) -> None:
    """Raise if a report nests too deeply, or has text that cannot be stored or printed."""
    # A list instead of recursion, because the depth is not checked yet.
    waiting: list[tuple[Any, int]] = [(row, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError("text with half of a surrogate pair") from None
        elif isinstance(value, dict):
            waiting += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]


def _check_fields(row: Mapping[str, Any]) -> None:
    """Raise if a field of a report has the wrong type."""
    if "group" in row:
        steps = row.get("steps_completed")
        if not isinstance(row["group"], str) or not isinstance(row.get("metrics"), dict):
            raise ValueError("expected a name under 'group' and values by name under 'metrics'")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= LARGEST_STEP:
            raise ValueError(f"steps_completed: expected a whole number from 0 to {LARGEST_STEP}")
    if "progress" in row:
        progress = number(row, "progress")
        if progress is None or not 0 <= progress <= 1:
            raise ValueError("progress: expected a number from 0 to 1")
    if "status" in row and not isinstance(row["status"], str):
        raise ValueError("status: expected text")


def _integer(digits: str) -> int:
    # Check the length first, because converting digits takes quadratic time.
    if len(digits) > 20 or abs(int(digits)) > _LARGEST_INTEGER:
        raise ValueError("a whole number of more than 64 bits")
    return int(digits)


def _constant(name: str) -> float:
    raise ValueError(f"the constant {name} is not JSON; write it as text: {json.dumps(name)}")
