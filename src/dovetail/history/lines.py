"""File format of a history: rows as lines of JSON, and atomic writes."""

from __future__ import annotations

import json
import math
import os
import reprlib
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from dovetail.errors import ConfigError

Row: TypeAlias = dict[str, str | int | float]
"""One event, with its `stage` (a string), its position (whole numbers) and its metrics (floats)."""

HEADER = "dovetail_history"
VERSION = 1
BATCHES = "batches"
CUSTOM = "custom"
_LOSSES_PER_LINE = 1000
_PATIENCE_SECONDS = 10.0
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def metrics_of(row: Row) -> Iterator[tuple[str, float]]:
    """Yield the metrics of a row with their public names, such as `valid_loss`."""
    prefix = "" if row["stage"] == CUSTOM else f"{row['stage']}_"
    return ((prefix + key, value) for key, value in row.items() if isinstance(value, float))


def loss_rows(losses: array[float]) -> Iterator[dict[str, Any]]:
    """Yield batch losses as rows of a file."""
    for start in range(0, len(losses), _LOSSES_PER_LINE):
        yield {"stage": BATCHES, "losses": losses[start : start + _LOSSES_PER_LINE].tolist()}


def encode(value: Any) -> Any:
    """Return a value in a form that JSON can represent: NaN and infinities become strings."""
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def decode(key: str, value: Any) -> Any:
    """Return the original of a value that `encode` returned for a key."""
    if isinstance(value, list):
        return [decode(key, item) for item in value]
    # The name of a stage is text, even if it is "NaN".
    return _NON_FINITE.get(value, value) if isinstance(value, str) and key != "stage" else value


def as_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of a file."""
    encoded = {key: encode(value) for key, value in row.items()}
    return json.dumps(encoded, allow_nan=False).encode() + b"\n"


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; an incomplete last line is left out."""
    header, *lines = path.read_bytes().split(b"\n")
    check_header(path, header)
    for number, line in enumerate(lines, start=2):
        try:
            yield _parse_row(line)
        except ValueError as error:
            # Every complete line ends with a newline, so the last part is empty or incomplete.
            if number <= len(lines):
                raise ConfigError(f"{path}, line {number}: {error}") from None


def check_header(path: Path, line: bytes) -> None:
    """Raise if a file is not a history, or has another format version."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or HEADER not in header:
        raise ConfigError(f'{path}, line 1: not a Dovetail history, which starts with {{"{HEADER}": {VERSION}}}')
    if header[HEADER] != VERSION:
        raise ConfigError(
            f"{path}, line 1: a history of format {header[HEADER]!r}, this Dovetail reads format {VERSION}"
        )


def _parse_row(line: bytes) -> dict[str, Any]:
    """Return the row of a line; raise ValueError if the line has another form."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("stage"), str):
        raise ValueError("expected a JSON object with a 'stage'")
    if row["stage"] == BATCHES:
        losses = decode("losses", row.get("losses"))
        if not isinstance(losses, list) or not all(type(loss) is float for loss in losses):
            raise ValueError("expected the batch losses as a list of floats")
        return {**row, "losses": losses}
    return decode_row(row)


def decode_row(row: Any) -> Row:
    """Return the original of a row whose values were encoded by `encode`.

    Raises:
        ValueError: It is not a row.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get("stage"), str):
        raise ValueError("expected a row with a 'stage'")
    decoded = {str(key): decode(key, value) for key, value in row.items()}
    for key, value in decoded.items():
        if key != "stage" and (type(value) not in (int, float) or (type(value) is int and value.bit_length() > 4096)):
            raise ValueError(f"{key!r} should be a number, not {reprlib.repr(value)}")
    return decoded


def _open_alone(path: Path) -> BinaryIO:
    """Open a file for writing, and wait for other processes that write to the same name."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        file = path.open("ab")
        if os.name == "nt":
            return file
        import fcntl

        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                # A child of a killed writer may hold the lock as long as it runs.
                path.unlink(missing_ok=True)
            file.close()
            time.sleep(0.01)
            continue
        except OSError:
            return file  # the file system does not support locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        # Meanwhile the other process has renamed the file to its final name.
        file.close()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # All writers use the same name, so that the next one overwrites the file of a killed process.
    unfinished = path.with_name(f".{path.name}.tmp")
    file = _open_alone(unfinished)
    try:
        with file:
            file.truncate(0)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            # While the file is locked: another writer must not truncate it before it has its final name.
            if os.name != "nt":
                unfinished.replace(path)
        # Windows cannot rename an open file.
        if os.name == "nt":
            unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    if os.name == "nt":
        return
    # A rename is on the disk only after the folder is synced; Windows has no such call.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
