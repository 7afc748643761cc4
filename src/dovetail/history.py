"""What a run has measured: its metrics, event by event, in memory and as lines of a file.

This module starts without torch: a history is read, compared and drawn where no model is.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.extras import require
from dovetail.units import counted

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

__all__ = ["History", "LossTracker", "Mode", "Row", "RunHistory", "mode_of"]

Row: TypeAlias = dict[str, str | int | float]
"""One event, with its `stage` (a string), its position (whole numbers) and its metrics (floats)."""

Mode: TypeAlias = Literal["min", "max"]
"""Whether small or large values of a metric are good."""

_SMALL_IS_GOOD = frozenset({"loss", "error", "err", "mse", "rmse", "mae", "mape", "perplexity", "ppl", "nll", "fid"})
_LARGE_IS_GOOD = frozenset(
    {"accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "score", "bleu", "rouge", "iou", "dice", "psnr"}
)


def mode_of(monitor: str) -> Mode:
    """Return whether small (`min`) or large (`max`) values of a metric are good, by the words of its name.

    Raises:
        ConfigError: The name says neither or both.

    Example:
        >>> mode_of("valid_loss"), mode_of("valid_accuracy")
        ('min', 'max')
    """
    mode = _mode(monitor)
    if mode is None:
        raise ConfigError(f"monitor {monitor!r}: give mode='min' or mode='max', its name does not say which is good")
    return mode


def _mode(metric: str) -> Mode | None:
    words = set(re.findall(r"[a-z]+1?", metric.lower()))
    falls, rises = bool(words & _SMALL_IS_GOOD), bool(words & _LARGE_IS_GOOD)
    return None if falls == rises else "min" if falls else "max"


class RunHistory:
    """Named metrics, each with every value it has had.

    Example:
        >>> history = RunHistory()
        >>> history.update_metric("train_loss", 0.5)
        >>> history.update_metric("train_loss", 0.25)
        >>> history.get_metric_values("train_loss"), history.get_latest_metric("train_loss")
        ([0.5, 0.25], 0.25)
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def get_metric_names(self) -> set[str]:
        """Return the names of all metrics that have a value."""
        return set(self._values)

    def get_metric_values(self, name: str) -> list[float]:
        """Return every value of a metric, oldest first; an unknown metric has none."""
        return list(self._values.get(name, ()))

    def get_latest_metric(self, name: str) -> float:
        """Return the newest value of a metric.

        Raises:
            ValueError: The metric has no value; the message names the nearest one that has.
        """
        values = self.get_metric_values(name)
        if not values:
            raise self._unknown(name)
        return values[-1]

    def update_metric(self, name: str, value: Tensor | float) -> None:
        """Add a value, a number or a tensor with one element, to a metric."""
        self._values.setdefault(name, []).append(_number(value))

    def reset(self) -> None:
        """Forget everything."""
        self._values.clear()

    def _unknown(self, name: str) -> ConfigError:
        if not (known := self.get_metric_names()):
            return ConfigError(f"metric {name!r} has no value: nothing has been recorded yet")
        return UnknownNameError("metric", name, known)


class LossTracker:
    """The average loss of an epoch, weighted by samples.

    Losses may be tensors with a graph, on any device: the tracker keeps sums of its own without the graph,
    and nothing waits for the device until a number is read.

    Example:
        >>> tracker = LossTracker()
        >>> tracker.update(1.0, batch_size=3)
        >>> tracker.update(2.0, batch_size=1)
        >>> tracker.average, tracker.loss_value
        (1.25, 2.0)
    """

    def __init__(self) -> None:
        self.running_count = 0
        self._total: Tensor | float = 0.0
        self._last: Tensor | float = math.nan

    def update(self, loss: Tensor | float, batch_size: int = 1) -> None:
        """Add the mean loss of one batch of `batch_size` samples."""
        self.running_count += batch_size
        if isinstance(loss, (int, float)):
            self._last = float(loss)
            self._total = self._total + loss * batch_size
            return
        # A clone: a step that is replayed as one graph writes the next loss into the same memory.
        self._last = last = loss.detach().clone()
        if isinstance(self._total, float):
            # A bfloat16 sum stops growing after a few hundred batches. Apple's GPUs have no float64.
            wide = last.float() if last.device.type == "mps" else last.double()
            self._total = wide * batch_size + self._total
        else:
            self._total = self._total.add(last, alpha=batch_size)

    def reset(self) -> None:
        """Start a new epoch."""
        self.running_count, self._total, self._last = 0, 0.0, math.nan

    @property
    def average(self) -> float:
        """The mean loss of all samples; NaN when there were none."""
        return self.total_loss / self.running_count if self.running_count else math.nan

    @property
    def total_loss(self) -> float:
        """The sum of the losses of all samples."""
        return float(self._total)

    @property
    def loss_value(self) -> float:
        """The loss of the last batch; NaN when there was none."""
        return float(self._last)


class History(RunHistory):
    """The record of a whole run: one row per event, and the loss of every training batch.

    A row is a flat dictionary: the `stage`, where training stood (`epoch`, `batches`, `updates`, …, which
    are whole numbers), and the metrics, which are always floats. The metric names of `RunHistory` are views
    of the rows: `train_loss` is `loss` in the rows of stage `train`; in stage `custom` a metric goes by its
    bare name.

    On disk a history is JSON lines: the header `{"dovetail_history": 1}`, then one row per line; lines of
    stage `batches` hold batch losses. Python writes the shortest decimal that reads back as the same float,
    so nothing is rounded. JSON has no NaN and no infinity: they are the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`.

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
        rows: Every event, oldest first.
        losses: The loss of every training batch, oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.losses = array("d")
        # Where losses stand among the rows: (rows before them, losses up to their end).
        self._cuts: list[tuple[int, int]] = []
        self._path: Path | None = None
        self._size = 0

    # Recording

    def record(self, stage: str, metrics: Mapping[str, Tensor | float], **position: SupportsIndex) -> None:
        """Add one event.

        Args:
            stage: What ran: `train`, `valid`, `test`, or a name of your own.
            metrics: Numbers, or tensors with one element.
            **position: Where training stood, in whole numbers: `epoch`, `batches`, `updates`, …
        """
        if stage == _BATCHES:
            raise ConfigError(f"stage {stage!r} is reserved for batch losses: use extend_losses")
        if taken := metrics.keys() & {"stage", *position}:
            raise ConfigError(
                f"metric {min(taken)!r} of stage {stage!r} has the name of a position in its row: rename it"
            )
        row: Row = {"stage": stage}
        row.update((name, operator.index(count)) for name, count in position.items())
        row.update((name, _number(value)) for name, value in metrics.items())
        # The file first: if the disk is full, neither the file nor the memory has the row.
        self._append(*self._waiting_losses(), row)
        self._cuts += self._open_cut()
        self.rows.append(row)

    def extend_losses(self, values: Iterable[float]) -> None:
        """Add the losses of training batches; an attached file gets them with the next row, or with `sync`."""
        self.losses.extend(values)

    def update_metric(self, name: str, value: Tensor | float) -> None:
        """Add a row of stage `custom`, whose metric is known by its bare name."""
        self.record(_CUSTOM, {name: value})

    def reset(self) -> None:
        """Forget everything; an attached file becomes empty too."""
        self._replace([], array("d"), [])

    # Reading

    def get_metric_names(self) -> set[str]:
        """Return the names of all metrics that have a value."""
        return {name for row in self.rows for name, _ in _metrics(row)}

    def get_metric_values(self, name: str) -> list[float]:
        """Return every value of a metric, oldest first; an unknown metric has none."""
        return [value for _, value in self._series(name)]

    def get_latest_metric(self, name: str) -> float:
        """Return the newest value of a metric.

        Raises:
            ValueError: The metric has no value; the message names the nearest one that has.
        """
        if (row := self.last(name)) is None:
            raise self._unknown(name)
        return dict(_metrics(row))[name]

    def best(self, name: str, mode: Mode | None = None) -> Row | None:
        """Return the row in which a metric was best, the earliest of equals; NaN is never best.

        Args:
            name: A metric, such as `valid_loss`.
            mode: Whether small (`min`) or large (`max`) values are good; None goes by the name, as `mode_of` reads it.

        Returns:
            The row, or None if the metric has no value that can be compared.
        """
        if mode not in (None, "min", "max"):
            raise ConfigError(f"mode: expected 'min', 'max' or None, got {mode!r}")
        points = [(row, value) for row, value in self._series(name) if not math.isnan(value)]
        if not points:
            return None
        pick = min if (mode or mode_of(name)) == "min" else max
        return pick(points, key=operator.itemgetter(1))[0]

    def last(self, name: str) -> Row | None:
        """Return the newest row that has a metric, or None."""
        return next((row for row in reversed(self.rows) for known, _ in _metrics(row) if known == name), None)

    def to_dict(self) -> dict[str, list[str | int | float | None]]:
        """Return the rows as columns of equal length, with None where a row has no such key."""
        columns = dict.fromkeys(key for row in self.rows for key in row)
        return {key: [row.get(key) for row in self.rows] for key in columns}

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a data frame, in which a missing metric is NaN and whole numbers stay whole.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pd = require("pandas", "pandas")
        columns = self.to_dict()
        counters = [key for key, column in columns.items() if any(isinstance(value, int) for value in column)]
        frame: pandas.DataFrame = pd.DataFrame(columns).astype(dict.fromkeys(counters, "Int64"))
        return frame

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        # By the encoded form, in which NaN equals NaN.
        return isinstance(other, History) and self._encoded() == other._encoded()

    def __repr__(self) -> str:
        latest = {name: value for row in self.rows for name, value in _metrics(row)}
        counts = counted(len(self.rows), "row")
        if self.losses:
            counts += f", {counted(len(self.losses), 'batch loss', 'batch losses')}"
        shown = ", ".join(f"{name}={value:.4g}" for name, value in latest.items())
        return f"History({counts}{': ' if shown else ''}{shown})"

    def _series(self, name: str) -> list[tuple[Row, float]]:
        return [(row, value) for row in self.rows for known, value in _metrics(row) if known == name]

    # Keeping

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole history to a file, at once or not at all; folders on the way are created."""
        _write_atomically(Path(path), self._content())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Return the history of a file; a last line that a crash cut short is left out.

        Raises:
            ConfigError: The file is not a history; the message names the line.
        """
        history = cls()
        for row in _read_rows(Path(path)):
            if row["stage"] == _BATCHES:
                history.losses.extend(row["losses"])
                history._cuts += history._open_cut()
            else:
                history.rows.append(row)
        return history

    def attach(self, path: str | os.PathLike[str]) -> None:
        """Make a file hold exactly this history, from now on.

        What the file held before is replaced: a run that resumes from a checkpoint drops the rows that the
        lost part of the run had written. Every row that is recorded later is handed to the operating system
        as one line, which survives a killed process; `sync` makes it survive a power cut.

        Raises:
            ConfigError: The file exists and is not a history.
        """
        path = Path(path).absolute()
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                _check_header(path, file.readline())
        content = self._content()
        _write_atomically(path, content)
        self._cuts += self._open_cut()
        self._path, self._size = path, len(content)

    def detach(self) -> None:
        """Leave the attached file as it is and write to it no more."""
        self._path = None

    def sync(self) -> None:
        """Write what is not written yet and wait until the attached file is on the disk; without one, do nothing."""
        self._append(*self._waiting_losses())
        self._cuts += self._open_cut()
        if self._path is not None:
            with self._path.open("rb+") as file:
                os.fsync(file.fileno())

    def state_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON can hold, exactly."""
        return {**self._encoded(), "cuts": [list(cut) for cut in self._cuts]}

    def _encoded(self) -> dict[str, Any]:
        return {
            "rows": [{key: _encode(value) for key, value in row.items()} for row in self.rows],
            "losses": [_encode(loss) for loss in self.losses],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the history that `state` was taken from; an attached file follows."""
        self._replace(
            [{key: _decode(key, value) for key, value in row.items()} for row in state["rows"]],
            array("d", [float(_decode("losses", loss)) for loss in state["losses"]]),
            [(int(rows), int(losses)) for rows, losses in state["cuts"]],
        )

    def __getstate__(self) -> dict[str, Any]:
        # Two writers would double every row: a copy, in this process or another, writes nowhere.
        return {**self.__dict__, "_path": None}

    def _replace(self, rows: list[Row], losses: array[float], cuts: list[tuple[int, int]]) -> None:
        self.rows, self.losses, self._cuts = rows, losses, cuts
        if self._path is not None:
            self.attach(self._path)

    def _content(self) -> bytes:
        # Losses stand where they were written first, so that a run which was killed and resumed leaves the same file.
        lines: list[Mapping[str, Any]] = [{_HEADER: _VERSION}]
        row, loss = 0, 0
        for next_row, next_loss in [*self._cuts, *self._open_cut()]:
            lines += [*self.rows[row:next_row], *_loss_rows(self.losses[loss:next_loss])]
            row, loss = next_row, next_loss
        lines += self.rows[row:]
        return b"".join(map(_line, lines))

    def _open_cut(self) -> list[tuple[int, int]]:
        """Where the losses since the last cut would stand now; nothing if there are none."""
        cut = (len(self.rows), len(self.losses))
        return [cut] if cut[1] > self._num_written else []

    def _waiting_losses(self) -> Iterator[dict[str, Any]]:
        return _loss_rows(self.losses[self._num_written :])

    @property
    def _num_written(self) -> int:
        return self._cuts[-1][1] if self._cuts else 0

    def _append(self, *rows: Mapping[str, Any]) -> None:
        if self._path is None or not rows:
            return
        lines = b"".join(map(_line, rows))
        with self._path.open("rb+") as file:
            # Half a line that an earlier write to a full disk has left is overwritten, not continued.
            file.truncate(self._size)
            file.seek(self._size)
            file.write(lines)
        self._size += len(lines)

    # Drawing

    def plot(self, path: str | os.PathLike[str], names: Iterable[str] | None = None) -> None:
        """Draw the learning curves into an image file: one panel per metric, one colour per stage.

        The loss comes first, the learning rate (`lr`) last; the best validation loss and accuracy are marked.

        Args:
            path: The image; its suffix (`.png`, `.svg`, `.pdf`) is the format.
            names: The metrics to draw, such as `valid_loss`; None draws all.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        known = list(dict.fromkeys(name for row in self.rows for name, _ in _metrics(row)))
        chosen = known if names is None else list(names)
        for name in chosen:
            if name not in known:
                raise self._unknown(name)
        if not chosen:
            raise ConfigError("there is nothing to draw: the history has no metrics")
        _draw(Path(path), {name: self._series(name) for name in chosen})


# Rows and lines

_HEADER = "dovetail_history"
_VERSION = 1
_BATCHES = "batches"
_CUSTOM = "custom"
_LOSSES_PER_LINE = 1000
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _number(value: Tensor | float) -> float:
    # Not float(tensor): it warns about a tensor that still has its graph.
    return float(value) if isinstance(value, (int, float)) else float(value.item())


def _metrics(row: Row) -> Iterator[tuple[str, float]]:
    prefix = "" if row["stage"] == _CUSTOM else f"{row['stage']}_"
    return ((prefix + key, value) for key, value in row.items() if isinstance(value, float))


def _loss_rows(losses: array[float]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(losses), _LOSSES_PER_LINE):
        yield {"stage": _BATCHES, "losses": losses[start : start + _LOSSES_PER_LINE].tolist()}


def _encode(value: Any) -> Any:
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(key, item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) and key != "stage" else value


def _line(row: Mapping[str, Any]) -> bytes:
    encoded = {key: _encode(value) for key, value in row.items()}
    return json.dumps(encoded, allow_nan=False).encode() + b"\n"


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    header, *lines = path.read_bytes().split(b"\n")
    _check_header(path, header)
    for number, line in enumerate(lines, start=2):
        try:
            yield _parse_row(line)
        except ValueError as error:
            # Every line ends with a newline, so what follows the last one is empty or was cut short.
            if number <= len(lines):
                raise ConfigError(f"{path}, line {number}: {error}") from None


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or _HEADER not in header:
        raise ConfigError(f'{path}, line 1: not a Dovetail history, which begins with {{"{_HEADER}": {_VERSION}}}')
    if header[_HEADER] != _VERSION:
        raise ConfigError(
            f"{path}, line 1: a history of format {header[_HEADER]!r}, this Dovetail reads format {_VERSION}"
        )


def _parse_row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("stage"), str):
        raise ValueError("expected a JSON object with a 'stage'")
    decoded = {key: _decode(key, value) for key, value in row.items()}
    if row["stage"] == _BATCHES:
        losses = decoded.get("losses")
        if not isinstance(losses, list) or not all(type(loss) is float for loss in losses):
            raise ValueError("expected the batch losses as a list of floats")
        return decoded
    for key, value in decoded.items():
        if key != "stage" and type(value) not in (int, float):
            raise ValueError(f"{key!r} should be a number, not {value!r}")
    return decoded


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name for all: what a killed process has left is overwritten by the next.
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    if os.name == "nt":
        return
    # The rename itself is on the disk only when the folder is; Windows has no such call.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# Drawing. The colours are those of Okabe and Ito, which colour-blind readers can tell apart.

_STAGES = {"train": ("#0072B2", "o"), "valid": ("#D55E00", "s"), "test": ("#009E73", "^")}
_OTHERS = (("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"))
_SPELLINGS = {"val": "valid", "validation": "valid"}
_INK, _GRID = "#333333", "#E3E3E3"

_Series: TypeAlias = list[tuple[Row, float]]


def _draw(path: Path, series: Mapping[str, _Series]) -> None:
    figures = require("matplotlib.figure", "plot")
    panels: dict[str, dict[str, _Series]] = {}
    for name, points in series.items():
        metric, stage = _split(name, str(points[0][0]["stage"]))
        panels.setdefault(metric, {}).setdefault(stage, []).extend(points)
    order = sorted(panels, key=lambda metric: (metric == "lr") - (metric == "loss"))
    others = dict.fromkeys(stage for panel in panels.values() for stage in panel if stage not in _STAGES)
    styles = _STAGES | dict(zip(others, itertools.cycle(_OTHERS), strict=False))
    counter = _common_counter(list(series.values()))

    columns = min(len(order), 3)
    lines = math.ceil(len(order) / columns)
    # A Figure of its own, never pyplot: nothing global changes, and no display is needed.
    figure = figures.Figure(figsize=(4.8 * columns, 3.6 * lines), dpi=144, layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for metric, axes in zip(order, places, strict=False):
        _draw_panel(axes, metric, panels[metric], styles, counter)
    for axes in places[len(order) :]:
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(
    axes: Any,
    metric: str,
    curves: Mapping[str, _Series],
    styles: Mapping[str, tuple[str, str]],
    counter: str,
) -> None:
    for stage, points in curves.items():
        colour, marker = styles[stage]
        x = [row[counter] for row, _ in points] if counter else range(1, len(points) + 1)
        y = [value for _, value in points]
        best = _best_index(metric, y) if stage == "valid" else None
        # The number stands in the legend: beside its point it would lie on the other curves.
        label = stage if best is None else f"{stage}, best {y[best]:.4g}"
        marks = {"marker": marker, "markersize": 4.5, "markevery": math.ceil(len(y) / 12)}
        axes.plot(x, y, color=colour, linewidth=1.7, label=label, **marks)
        if best is not None:
            axes.plot(x[best], y[best], "o", markersize=12, markerfacecolor="none", markeredgecolor=_INK)
    values = [value for points in curves.values() for _, value in points if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
    elif values and min(values) == max(values):
        # A constant shows as one, rather than as the middle of an axis that is all decimals.
        axes.set_ylim(min(0.0, 2 * values[0]), max(0.0, 2 * values[0]) or 1.0)
    axes.margins(x=0.05, y=0.12)
    axes.set_title(metric, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set_xlabel(counter, color=_INK)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=_INK, labelsize=9)
    if len(curves) > 1 or "valid" in curves:
        axes.legend(frameon=False, fontsize=9, labelcolor=_INK)


def _split(name: str, stage: str) -> tuple[str, str]:
    """Return the metric and the stage that a name such as `valid_loss` is made of."""
    if stage != _CUSTOM:
        return name.removeprefix(f"{stage}_"), stage
    head, _, metric = name.partition("_")
    head = _SPELLINGS.get(head, head)
    return (metric, head) if metric and head in _STAGES else (name, "")


def _common_counter(curves: list[_Series]) -> str:
    """Return the coarsest counter that tells the points of every curve apart, or nothing."""
    for counter in ("epoch", "updates", "batches"):
        columns = [[row.get(counter) for row, _ in points] for points in curves]
        if all(None not in column and len(set(column)) == len(column) for column in columns):
            return counter
    return ""


def _best_index(metric: str, values: list[float]) -> int | None:
    """Return where a metric was best, or None if nobody can say what is good."""
    comparable = [index for index, value in enumerate(values) if math.isfinite(value)]
    mode = _mode(metric)
    if mode is None or not comparable:
        return None
    return (min if mode == "min" else max)(comparable, key=values.__getitem__)
