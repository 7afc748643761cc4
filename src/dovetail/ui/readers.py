"""Readers of growing files: histories of runs and reports of trials. Only new bytes are read."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.history.lines import BATCHES, HEADER, VERSION
from dovetail.search.reports import Reports
from dovetail.ui.columns import Columns

_CHUNK = 8 << 20
# A line without an end is not read: it would fill the memory.
_LONGEST_LINE = 64 << 20
_TAIL = 64


def _parser() -> Callable[[bytes], Any]:
    """Return a function that parses JSON; orjson comes with nicegui and is several times as fast."""
    try:
        import orjson
    except ImportError:
        return json.loads
    return orjson.loads


class HistoryReader:
    r"""Reads a history file while it grows.

    A file that was replaced, cut, or changed before the last position is read again from its start. Lines that are not
    rows are counted and left out, and an incomplete last line is read when it is complete.

    Attributes:
        path: The file.
        columns: The numbers that were read.
        problem: Why the file cannot be read, in one sentence; None if it can.
        num_rejected: The number of lines that are not rows.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "ck_history.jsonl"
        >>> _ = path.write_text('{"dovetail_history": 1}\n{"stage": "valid", "epoch": 1, "loss": 0.5}\n{"sta')
        >>> reader = HistoryReader(path)
        >>> reader.update(), reader.columns.metrics(), reader.update()
        (True, ['valid_loss'], False)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = Columns()
        self.problem: str | None = None
        self.num_rejected = 0
        self._parse = _parser()
        self._reset(None)

    def update(self) -> bool:
        """Read what is new, and return whether anything has changed."""
        try:
            # A FIFO would block without O_NONBLOCK.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            problem = error.strerror or str(error)
            changed, self.problem = self.problem != problem, problem
            return changed
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                self.problem = "not a regular file"
                return False
            changed = False
            if self._is_other(file, found):
                changed = self._at > 0
                self._reset((found.st_dev, found.st_ino))
            return self._read(file, found.st_size) or changed

    def forget(self) -> None:
        """Free the memory of all numbers; the next `update` reads the file again."""
        self._reset(None)

    def _reset(self, identity: tuple[int, int] | None) -> None:
        self.columns, self.problem, self.num_rejected = Columns(), None, 0
        self._at, self._tail, self._identity, self._has_header = 0, b"", identity, False

    def _is_other(self, file: Any, found: os.stat_result) -> bool:
        if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._at:
            return True
        if found.st_size == self._at:
            return False
        # The file may have been cut and written again beyond the last position.
        file.seek(self._at - len(self._tail))
        return bool(file.read(len(self._tail)) != self._tail)

    def _read(self, file: Any, size: int) -> bool:
        changed = False
        while self._at < size and self.problem is None:
            file.seek(self._at)
            chunk = file.read(_CHUNK)
            end = chunk.rfind(b"\n") + 1
            if not end and len(chunk) == _CHUNK:
                chunk += file.read(_LONGEST_LINE)
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) > _LONGEST_LINE:
                    self.problem = f"a line is longer than {_LONGEST_LINE >> 20} MB"
                    return True
            if not end:
                break
            self._at += end
            self._tail = chunk[max(0, end - _TAIL) : end]
            self._take(chunk[: end - 1].split(b"\n"))
            changed = True
        return changed

    def _take(self, lines: list[bytes]) -> None:
        if not self._has_header:
            header = self._parsed(lines.pop(0))
            if not isinstance(header, dict) or header.get(HEADER) != VERSION:
                self.problem = "not a Dovetail history of format 1"
                return
            self._has_header = True
        try:
            # One call for all lines: several times as fast as a call per line.
            rows = self._parse(b"[" + b",".join(lines) + b"]") if lines else []
        except (ValueError, RecursionError):
            rows = [self._parsed(line) for line in lines]
        kept: list[tuple[str, dict[str, Any]]] = []
        for row in rows:
            if not isinstance(row, dict) or not isinstance(stage := row.pop("stage", None), str):
                self.num_rejected += 1
            elif stage == BATCHES:
                self._add_losses(row)
            else:
                kept.append((stage, row))
        self.columns.extend(kept)

    def _parsed(self, line: bytes) -> Any:
        try:
            return self._parse(line)
        except (ValueError, RecursionError):
            return None

    def _add_losses(self, row: dict[str, Any]) -> None:
        try:
            self.columns.losses.extend(row["losses"])
        except (KeyError, TypeError):
            self._add_spelled(row.get("losses"))

    def _add_spelled(self, losses: Any) -> None:
        """Add losses among which are NaN or infinities, which are written as text."""
        # `extend` has added the losses before the first text.
        if not isinstance(losses, list):
            self.num_rejected += 1
            return
        first = next(index for index, loss in enumerate(losses) if isinstance(loss, str) or loss is None)
        for loss in losses[first:]:
            try:
                self.columns.losses.append(float(loss))
            except (TypeError, ValueError):
                self.columns.losses.append(float("nan"))


_STAGES = {"training": "train", "validation": "valid"}


class ReportsReader:
    """Reads the reports of a trial while it writes them; the group `validation` becomes the stage `valid`.

    A trial that resumes repeats reports; the later one of the same group and step is valid.

    Attributes:
        path: The file `metrics.jsonl`.
        columns: The numbers that were read.
        problem: Why the file cannot be read, in one sentence; None if it can.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = Columns()
        self.problem: str | None = None
        self._reports = Reports(path)
        self._rows: dict[tuple[str, int], dict[str, Any]] = {}

    def update(self) -> bool:
        """Read what is new, and return whether anything has changed."""
        try:
            if self.path.is_file() and self.path.stat().st_size < self._reports._at:
                self.forget()
            new = [row for row in self._reports.read() if "group" in row]
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False
        is_repeated = False
        for row in new:
            stage = _STAGES.get(row["group"], str(row["group"]))
            key = (stage, row["steps_completed"])
            is_repeated = is_repeated or key in self._rows
            self._rows[key] = {
                **_numbers(row["metrics"], f"{row['group']}_"),
                "batches": key[1],
                "time": row.get("time"),
            }
            if not is_repeated:
                self.columns.add(stage, self._rows[key])
        if is_repeated:
            self.columns = Columns()
            for (stage, _), each in sorted(self._rows.items(), key=lambda pair: pair[0][1]):
                self.columns.add(stage, each)
        return bool(new)

    def forget(self) -> None:
        """Free the memory of all numbers; the next `update` reads the file again."""
        self.columns, self._rows, self._reports = Columns(), {}, Reports(self.path)


def _numbers(metrics: Any, prefix: str) -> dict[str, float]:
    """Return the numbers of a report by name, without a prefix that repeats the group: `validation_loss` is `loss`."""
    found = metrics.items() if isinstance(metrics, dict) else ()
    numbers = {key: float(it) for key, it in found if isinstance(it, (int, float)) and not isinstance(it, bool)}
    return {key if (short := key.removeprefix(prefix)) in numbers else short: it for key, it in numbers.items()}


class LogTail:
    """Reads the end of a log file, and follows it.

    Args:
        path: The file.
        num_bytes: How much of its end is kept.
    """

    def __init__(self, path: Path, num_bytes: int = 64 << 10) -> None:
        self.path, self.num_bytes = path, num_bytes
        self.text = ""
        self._seen: tuple[int, int] | None = None

    def update(self) -> bool:
        """Read the end of the file, and return whether it has changed."""
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or (found.st_size, found.st_mtime_ns) == self._seen:
                    return False
                self._seen = found.st_size, found.st_mtime_ns
                file.seek(max(0, found.st_size - self.num_bytes))
                content = file.read(self.num_bytes)
        except OSError:
            return False
        if found.st_size > self.num_bytes:
            content = content[content.find(b"\n") + 1 :]
        self.text = content.decode("utf-8", "replace")
        return True
