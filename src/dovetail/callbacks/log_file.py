"""Callbacks that write metrics as rows of a CSV or JSON lines file."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.callbacks.base import Callback, is_new_run
from dovetail.checkpoint.files import damaged_name
from dovetail.history.lines import as_line, write_atomically

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class _RowLogger(Callback, ABC):
    """Writes one row per epoch, and per validation inside an epoch, to a file."""

    main_rank_only = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._rows: list[dict[str, Any]] = []
        # The limits of the last row in the file: the row of an epoch replaces the row of the validation at its end.
        self._start = self._end = 0

    def on_train_start(self, context: TrainingContext) -> None:
        if is_new_run(context):
            self._rows = []
        # Empties the file for a new run, and removes the rows after the checkpoint for a resumed one.
        self._write_all()

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        """Write a row; the row of an epoch replaces the one of the validation at its end."""
        progress = context.progress
        row = {"epoch": progress.epoch, "batches": progress.batches, "updates": progress.updates, **metrics}
        replaces = bool(self._rows) and int(self._rows[-1]["batches"]) == progress.batches
        if replaces:
            # Keep metrics that only the validation has.
            row = {**self._rows.pop(), **row}
        self._rows.append(row)
        if self._fits(row):
            self._write_last(self._start if replaces else self._end)
        else:
            self._write_all()

    on_validation_end = on_epoch_end

    def _write_last(self, start: int) -> None:
        """Write the last row at a position of the file, and remove everything after it."""
        content = self._encode(self._rows[-1:])
        with self.path.open("rb+") as file:
            # Write before truncating: if the process is killed in between, the replaced row is not lost.
            file.seek(start)
            file.write(content)
            file.truncate()
        self._start, self._end = start, start + len(content)

    def _write_all(self) -> None:
        """Write the whole file."""
        self._adopt(self._rows)
        content = self._head() + self._encode(self._rows)
        write_atomically(self.path, content)
        self._end = len(content)
        self._start = self._end - len(self._encode(self._rows[-1:]))

    @abstractmethod
    def _encode(self, rows: Iterable[Mapping[str, Any]]) -> bytes: ...

    @abstractmethod
    def _decode(self, lines: Iterable[str]) -> Iterable[dict[str, Any]]: ...

    def _head(self) -> bytes:
        return b""

    def _fits(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row can be appended without rewriting the file."""
        return True

    def _adopt(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the columns that `rows` need."""

    def state_dict(self) -> dict[str, Any]:
        return {"rows": len(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read the rows that were written before; the file is truncated to them when training starts."""
        number = int(state["rows"])
        self._rows = []
        kept = ""
        if self.path.exists():
            try:
                with self.path.open(encoding="utf-8", newline="") as file:
                    for row in itertools.islice(self._decode(file), number):
                        # A row without a position is damaged: the error ends the readable part.
                        int(row["batches"])
                        self._rows.append(row)
            # A damaged line ends the readable part; a damaged file must not end a resumed run.
            except (ValueError, TypeError, LookupError, RecursionError, csv.Error):
                damaged = damaged_name(self.path)
                self.path.rename(damaged)
                kept = f" (the damaged file is kept as {damaged.name})"
        if len(self._rows) < number:
            warnings.warn(
                f"{self.path} has {len(self._rows)} rows, the checkpoint has {number}: the others are lost{kept}",
                UserWarning,
                stacklevel=2,
            )


class CSVLogger(_RowLogger):
    """Write metrics as comma-separated values: a row per epoch, and per validation inside an epoch.

    The first columns are the position of training: `epoch`, `batches`, `updates`. A metric that appears later becomes a
    new column; rows without it have an empty cell.

    A new run starts a new file. A resumed run continues after the rows that its checkpoint has counted.

    Args:
        path: The file; missing folders are created.

    Example:
        >>> import tempfile
        >>> from dovetail.trainers.context import TrainingContext
        >>> context, logger = TrainingContext(), CSVLogger(Path(tempfile.mkdtemp()) / "log.csv")
        >>> logger.on_train_start(context)
        >>> logger.on_epoch_end(context, {"train_loss": 0.5})
        >>> print(logger.path.read_text(), end="")
        epoch,batches,updates,train_loss
        0,0,0,0.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._columns: list[str] = []

    def _encode(self, rows: Iterable[Mapping[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue().encode()

    def _decode(self, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
        for row in csv.DictReader(lines):
            # An empty cell means that the row lacks the metric.
            yield {name: value for name, value in row.items() if value}

    def _head(self) -> bytes:
        text = io.StringIO(newline="")
        if self._columns:
            csv.writer(text, lineterminator="\n").writerow(self._columns)
        return text.getvalue().encode()

    def _fits(self, row: Mapping[str, Any]) -> bool:
        # A new column changes the header, so the whole file must be written.
        return row.keys() <= set(self._columns)

    def _adopt(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._columns = list(dict.fromkeys(name for row in rows for name in row))


class JSONLLogger(_RowLogger):
    """Write metrics as JSON lines: an object per epoch, and per validation inside an epoch.

    Every object has the position of training: `epoch`, `batches`, `updates`. JSON has no NaN and no infinity: they are
    written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.

    A new run starts a new file. A resumed run continues after the rows that its checkpoint counted.

    Args:
        path: The file; missing folders are created.

    Example:
        >>> import tempfile
        >>> from dovetail.trainers.context import TrainingContext
        >>> context, logger = TrainingContext(), JSONLLogger(Path(tempfile.mkdtemp()) / "log.jsonl")
        >>> logger.on_train_start(context)
        >>> logger.on_epoch_end(context, {"train_loss": 0.5})
        >>> print(logger.path.read_text(), end="")
        {"epoch": 0, "batches": 0, "updates": 0, "train_loss": 0.5}
    """

    def _encode(self, rows: Iterable[Mapping[str, Any]]) -> bytes:
        return b"".join(map(as_line, rows))

    def _decode(self, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
        return map(json.loads, lines)
