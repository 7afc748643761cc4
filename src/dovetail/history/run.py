"""History of a whole run: metrics per event and the loss of every batch."""

from __future__ import annotations

import math
import operator
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, SupportsIndex

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.history.drawing import draw
from dovetail.history.journal import RunJournal
from dovetail.history.lines import (
    BATCHES,
    CUSTOM,
    HEADER,
    VERSION,
    Row,
    as_line,
    check_header,
    decode,
    decode_row,
    encode,
    loss_rows,
    metrics_of,
    read_rows,
    write_atomically,
)
from dovetail.history.metrics import Mode, RunHistory, as_number, mode_of
from dovetail.units import counted

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

_MAX_HEADER = 1000
# Number of rows that a notebook shows.
# Jupyter aligns cells at the right itself; converted notebooks may not.
_ROW = '<tr style="text-align:right">'
_SHOWN_ROWS = 20
_OTHER_FORMATS = (".csv", ".json", ".parquet", ".tsv", ".xlsx")


class History(RunHistory):
    """The history of a whole run: one row per event, and the loss of every training batch.

    A row is a flat dictionary: the `stage`, the position of training (`epoch`, `batches`, `updates`, …, which are whole
    numbers), and the metrics, which are always floats. The metric names of `RunHistory` are views of the rows:
    `train_loss` is `loss` in the rows of stage `train`; in stage `custom` a metric has its plain name.

    A history file contains JSON lines: the header `{"dovetail_history": 1}`, then one row per line; lines of stage
    `batches` contain batch losses. Python writes the shortest decimal that is read as the same float, so no precision
    is lost. JSON has no NaN and no infinity: they are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.

    Example:
        >>> history = History()
        >>> history.record("train", {"loss": 0.5}, epoch=1, updates=10)
        >>> history.record("valid", {"loss": 0.75, "accuracy": 0.9}, epoch=1, updates=10)
        >>> history.get_latest_metric("valid_accuracy")
        0.9
        >>> history.best("train_loss")
        {'stage': 'train', 'epoch': 1, 'updates': 10, 'loss': 0.5}
        >>> history
        History(2 rows: train_loss=0.5, valid_loss=0.75, valid_accuracy=0.9)

    Attributes:
        rows: All events, oldest first.
        losses: The losses of all training batches, oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.losses = array("d")
        # Positions of losses among the rows: (number of rows before them, number of losses up to their end).
        self._cuts: list[tuple[int, int]] = []
        self._path: Path | None = None
        self._size = 0
        self._journal: RunJournal | None = None

    # Recording

    def record(self, stage: str, metrics: Mapping[str, Tensor | float], **position: SupportsIndex) -> None:
        """Add one event.

        Args:
            stage: The stage that ran: `train`, `valid`, `test`, or any other name.
            metrics: Numbers, or tensors with one element.
            **position: The position of training, in whole numbers: `epoch`, `batches`, `updates`, …
        """
        if stage == BATCHES:
            raise ConfigError(f"stage {stage!r} is reserved for batch losses: use extend_losses")
        if taken := metrics.keys() & {"stage", *position}:
            raise ConfigError(
                f"metric {min(taken)!r} of stage {stage!r} has the same name as a position in its row: rename it"
            )
        row: Row = {"stage": stage}
        for name, count in position.items():
            row[name] = operator.index(count)
        for name, value in metrics.items():
            row[name] = as_number(name, value)
        # Write the file first: if the disk is full, neither the file nor the memory has the row.
        self._append(row)
        self._cuts += self._open_cut()
        self.rows.append(row)
        if self._journal is not None:
            self._journal.mark(len(self.rows))
            if monotonic() >= self._journal.sampler.due:
                self._journal.sampler.sample(self.losses)

    def extend_losses(self, values: Iterable[float]) -> None:
        """Add the losses of training batches; an attached file gets them with the next row or call of `sync`."""
        self.losses.extend(values)
        # Not a method: without a sample, a report costs no further Python call.
        if self._journal is not None and monotonic() >= self._journal.sampler.due:
            self._journal.sampler.sample(self.losses)

    def update_metric(self, name: str, value: Tensor | float) -> None:
        """Add a row of stage `custom`, whose metric has its plain name."""
        self.record(CUSTOM, {name: value})

    def reset(self) -> None:
        """Remove everything, also from an attached file."""
        self._replace([], array("d"), [])

    # Reading

    def get_metric_names(self) -> set[str]:
        return {name for row in self.rows for name, _ in metrics_of(row)}

    def get_metric_values(self, name: str) -> list[float]:
        return [value for _, value in self._series(name)]

    def get_latest_metric(self, name: str) -> float:
        if (row := self.last(name)) is None:
            raise self._unknown(name)
        return dict(metrics_of(row))[name]

    def best(self, name: str, mode: Mode | None = None) -> Row | None:
        """Return the row with the best value of a metric, the first one if several are equal; NaN is never best.

        Args:
            name: A metric, such as `valid_loss`.
            mode: Whether small (`min`) or large (`max`) values are good; None means the result of `mode_of(name)`.

        Returns:
            The row, or None if the metric has no comparable value.
        """
        if mode not in (None, "min", "max"):
            raise ConfigError(f"mode: expected 'min', 'max' or None, got {mode!r}")
        points = [(row, value) for row, value in self._series(name) if not math.isnan(value)]
        if not points:
            return None
        pick = min if (mode or mode_of(name)) == "min" else max
        return pick(points, key=operator.itemgetter(1))[0]

    def last(self, name: str) -> Row | None:
        """Return the newest row with a metric, or None."""
        return next((row for row in reversed(self.rows) for known, _ in metrics_of(row) if known == name), None)

    def to_dict(self) -> dict[str, list[str | int | float | None]]:
        """Return the rows as columns of equal length, with None if a row lacks a key."""
        columns = dict.fromkeys(key for row in self.rows for key in row)
        return {key: [row.get(key) for row in self.rows] for key in columns}

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a data frame; missing metrics are NaN, and counters are whole numbers.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pd = require("pandas", "pandas")
        columns = self.to_dict()
        counters = [key for key, column in columns.items() if any(isinstance(value, int) for value in column)]
        # `Int64` has missing values, which rows without a counter need.
        frame: pandas.DataFrame = pd.DataFrame(columns).astype(dict.fromkeys(counters, "Int64"))
        return frame

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        # Compare the encoded form, in which NaN equals NaN.
        return isinstance(other, History) and self._encoded() == other._encoded()

    def __repr__(self) -> str:
        latest = {name: value for row in self.rows for name, value in metrics_of(row)}
        counts = counted(len(self.rows), "row")
        if self.losses:
            counts += f", {counted(len(self.losses), 'batch loss', 'batch losses')}"
        shown = ", ".join(f"{name}={value:.4g}" for name, value in latest.items())
        return f"History({counts}{': ' if shown else ''}{shown})"

    def _series(self, name: str) -> list[tuple[Row, float]]:
        return [(row, value) for row in self.rows for known, value in metrics_of(row) if known == name]

    # Saving and loading

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole history to a file of JSON lines, completely or not at all; missing folders are created.

        Raises:
            ConfigError: The suffix belongs to another format, such as `.csv`.
        """
        if Path(path).suffix.lower() in _OTHER_FORMATS:
            raise ConfigError(
                f"{os.fspath(path)}: a history is written as JSON lines, such as history.jsonl; for a table use "
                "history.to_pandas()"
            )
        write_atomically(Path(path), self._content())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Return the history of a file; an incomplete last line is left out.

        Raises:
            ConfigError: The file is not a history; the message has the number of the line.
        """
        history = cls()
        for row in read_rows(Path(path)):
            if row["stage"] == BATCHES:
                history.losses.extend(row["losses"])
                history._cuts += history._open_cut()
            else:
                history.rows.append(row)
        return history

    def attach(self, path: str | os.PathLike[str], journal: RunJournal | None = None) -> None:
        """Write this history to a file, and append every later row to it.

        The previous content of the file is replaced: when a run resumes from a checkpoint, the rows after it
        are removed. Every later row is written as one line, which is not lost if the process is killed; `sync` also
        protects it from a power failure.

        Args:
            path: The file.
            journal: The journal that gets the time of every later row; None means none.

        Raises:
            ConfigError: The file exists and is not a history.
        """
        path = Path(path).absolute()
        if path.is_dir():
            raise ConfigError(f"{path}: expected the file of a history, got a folder")
        # A wrong path must not overwrite a file of the user.
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                check_header(path, file.readline(_MAX_HEADER))
        content = self._content()
        write_atomically(path, content)
        self._cuts += self._open_cut()
        self._path, self._size, self._journal = path, len(content), journal

    def detach(self) -> None:
        """Stop writing to the attached file."""
        self._path, self._journal = None, None

    def sync(self) -> None:
        """Write pending losses and sync the attached file to the disk; without a file, do nothing."""
        self._append()
        self._cuts += self._open_cut()
        if self._path is not None:
            with self._path.open("rb+") as file:
                os.fsync(file.fileno())

    def state_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON can represent, without loss of precision."""
        return {**self._encoded(), "cuts": [list(cut) for cut in self._cuts]}

    def _encoded(self) -> dict[str, Any]:
        return {
            "rows": [{key: encode(value) for key, value in row.items()} for row in self.rows],
            "losses": [encode(loss) for loss in self.losses],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace this history by the one of `state`, also in an attached file."""
        self._replace(
            [decode_row(row) for row in state["rows"]],
            array("d", [float(decode("losses", loss)) for loss in state["losses"]]),
            [(int(rows), int(losses)) for rows, losses in state["cuts"]],
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy, in this process or another, is detached: two writers would write every row twice.
        return {**self.__dict__, "_path": None, "_journal": None}

    def _replace(self, rows: list[Row], losses: array[float], cuts: list[tuple[int, int]]) -> None:
        self.rows, self.losses, self._cuts = rows, losses, cuts
        if self._path is not None:
            self.attach(self._path, self._journal)

    def _content(self) -> bytes:
        """Return the whole history as the content of a file."""
        # Losses are placed where they were first written, so that resumed and uninterrupted runs write the same file.
        lines: list[Mapping[str, Any]] = [{HEADER: VERSION}]
        row, loss = 0, 0
        for next_row, next_loss in [*self._cuts, *self._open_cut()]:
            lines += [*self.rows[row:next_row], *loss_rows(self.losses[loss:next_loss])]
            row, loss = next_row, next_loss
        lines += self.rows[row:]
        return b"".join(map(as_line, lines))

    def _open_cut(self) -> list[tuple[int, int]]:
        """Return the position of the losses since the last cut; an empty list if there are none."""
        cut = (len(self.rows), len(self.losses))
        return [cut] if cut[1] > self._num_written else []

    @property
    def _num_written(self) -> int:
        return self._cuts[-1][1] if self._cuts else 0

    def _append(self, *rows: Mapping[str, Any]) -> None:
        """Append the losses since the last cut, and rows, to the attached file; without one, do nothing."""
        if self._path is None:
            return
        lines = b"".join(map(as_line, [*loss_rows(self.losses[self._num_written :]), *rows]))
        if not lines:
            return
        with self._path.open("rb+") as file:
            # Overwrite an incomplete line that an earlier write to a full disk has left.
            file.truncate(self._size)
            file.seek(self._size)
            file.write(lines)
        self._size += len(lines)

    # Drawing

    def plot(self, path: str | os.PathLike[str] | None = None, names: Iterable[str] | None = None) -> Any:
        """Draw the learning curves: one panel per metric, one colour per stage.

        The loss is first, the learning rate (`lr`) last; the best validation loss and accuracy are marked.

        Args:
            path: The path of the image; its suffix (`.png`, `.svg`, `.pdf`) sets the format. None means no file.
            names: The metrics to draw, such as `valid_loss`; None means all.

        Returns:
            The matplotlib figure. A notebook shows it if the call is the last line of a cell.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        known = list(dict.fromkeys(name for row in self.rows for name, _ in metrics_of(row)))
        chosen = known if names is None else list(names)
        for name in chosen:
            if name not in known:
                raise self._unknown(name)
        if not chosen:
            raise ConfigError("cannot draw an empty history: it has no metrics")
        return draw({name: self._series(name) for name in chosen}, None if path is None else Path(path))

    def _repr_html_(self) -> str:
        """Return the last rows as a table, for notebooks."""
        rows = self.rows[-_SHOWN_ROWS:]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[_cell(row.get(name)) for name in columns] for row in rows]
        left_out = len(self.rows) - len(rows)
        lines = [
            f"<table><thead>{_ROW}" + "".join(f"<th>{escape(name)}</th>" for name in columns) + "</tr></thead><tbody>",
            *(_ROW + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells),
            "</tbody></table>",
            f"<p>{escape(counted(left_out, 'earlier row'))}</p>" if left_out else "",
        ]
        return "".join(lines)


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
