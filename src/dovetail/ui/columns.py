"""Columns of numbers: the metrics and positions of a run, by stage, as they are read from a growing file."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.history.lines import CUSTOM

Numbers = NDArray[np.float64]

POSITIONS = ("epoch", "batches", "updates", "samples", "time")
BATCH_LOSS = "batch_loss"
"""The name of the losses of all training batches, which are not rows of a history."""

_PLAIN = {float, int}
_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass
class StageColumns:
    """The rows of one stage: one column per key, with NaN for values that a row does not have.

    Attributes:
        numbers: The number of each row in the run, from 1.
        columns: The values by key.
    """

    numbers: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(default_factory=dict)

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        """Add a row; values that are not numbers are left out."""
        length = len(self.numbers)
        self.numbers.append(number)
        for key, value in row.items():
            if type(value) is not float and (value := _as_float(value)) is None:
                continue
            column = self.columns.get(key)
            if column is None:
                column = self.columns[key] = array("d", [math.nan] * length)
            elif len(column) < length:
                column.extend([math.nan] * (length - len(column)))
            column.append(value)

    def extend(self, numbers: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Add several rows. Rows with equal keys and plain numbers are added by column, which is much faster."""
        if (columns := _as_columns(rows)) is None:
            for number, row in zip(numbers, rows, strict=True):
                self.add(number, row)
            return
        length = len(self.numbers)
        self.numbers.extend(numbers)
        for key, values in columns.items():
            column = self.columns.setdefault(key, array("d"))
            column.extend([math.nan] * (length - len(column)))
            column.extend(values)

    def column(self, key: str) -> Numbers | None:
        """Return the values of a key, one per row; None if no row has it."""
        column = self.columns.get(key)
        if column is None:
            return None
        values = np.full(len(self.numbers), np.nan)
        values[: len(column)] = column
        return values


def _as_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, array[float]] | None:
    """Return the values of rows by key; None if rows have different keys, or values that are not plain numbers."""
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        return None
    found = {}
    for name in names:
        values = [row[name] for row in rows]
        if not set(map(type, values)) <= _PLAIN:
            return None
        try:
            found[name] = array("d", values)
        except OverflowError:
            return None
    return found


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        # A whole number may be too large for a float.
        return float(value) if value.bit_length() < 1000 else None
    return _SPELLED.get(value) if isinstance(value, str) else value if isinstance(value, float) else None


@dataclass
class Columns:
    """All numbers of a run.

    Attributes:
        stages: The rows by stage.
        losses: The losses of all training batches.
        num_rows: The number of rows of all stages.
        positions: The keys that are positions; all other keys are metrics.

    Example:
        >>> columns = Columns()
        >>> columns.add("train", {"epoch": 1, "loss": 0.5})
        >>> columns.add("valid", {"epoch": 1, "loss": 0.75})
        >>> columns.metrics()
        ['train_loss', 'valid_loss']
        >>> columns.values("valid_loss")
        array([0.75])
    """

    stages: dict[str, StageColumns] = field(default_factory=dict)
    losses: array[float] = field(default_factory=lambda: array("d"))
    num_rows: int = 0
    positions: set[str] = field(default_factory=lambda: set(POSITIONS))

    def add(self, stage: str, row: Mapping[str, Any]) -> None:
        """Add a row. Whole numbers are positions, as in a history."""
        self.num_rows += 1
        if (rows := self.stages.get(stage)) is None:
            rows = self.stages[stage] = StageColumns()
            self.positions.update(key for key, value in row.items() if type(value) is int)
        rows.add(self.num_rows, row)

    def extend(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Add several rows, each with its stage; the result is that of `add` for each of them."""
        stages: dict[str, tuple[list[int], list[Mapping[str, Any]]]] = {}
        for number, (stage, row) in enumerate(rows, start=self.num_rows + 1):
            numbers, found = stages.setdefault(stage, ([], []))
            numbers.append(number)
            found.append(row)
        self.num_rows += len(rows)
        for stage, (numbers, found) in stages.items():
            if (known := self.stages.get(stage)) is None:
                known = self.stages[stage] = StageColumns()
                self.positions.update(key for key, value in found[0].items() if type(value) is int)
            known.extend(numbers, found)

    def metrics(self) -> list[str]:
        """Return the names of all metrics, in order of appearance; the losses of batches are the last."""
        found = [_public(stage, key) for stage, rows in self.stages.items() for key in rows.columns if self._is(key)]
        return [*dict.fromkeys(found), *([BATCH_LOSS] if self.losses else [])]

    def values(self, metric: str) -> Numbers:
        """Return all values of a metric, without NaN; empty if there is none."""
        if metric == BATCH_LOSS:
            return np.asarray(self.losses)
        place = self._place(metric)
        column = None if place is None else self.stages[place[0]].column(place[1])
        return np.empty(0) if column is None else column[~np.isnan(column)]

    def series(self, metric: str, x: str, times: Mapping[int, float] | None = None) -> tuple[Numbers, Numbers]:
        """Return the positions and the values of a metric.

        Args:
            metric: The name, such as `valid_loss`.
            x: `batches`, `updates`, `epoch`, `samples`, `time` (in seconds since the first row) or `row`.
            times: The times of rows by their number, for `time`; None means the column `time` of the rows.
        """
        if metric == BATCH_LOSS:
            losses = np.asarray(self.losses)
            return self._positions_of_batches(x, len(losses), times), losses
        if (place := self._place(metric)) is None:
            return np.empty(0), np.empty(0)
        rows = self.stages[place[0]]
        values, positions = rows.column(place[1]), self._positions(rows, x, times)
        assert values is not None
        if positions is None:
            return np.empty(0), np.empty(0)
        is_known = ~np.isnan(values) & ~np.isnan(positions)
        return positions[is_known], values[is_known]

    def last(self, metric: str) -> float | None:
        """Return the newest value of a metric, or None."""
        values = self.values(metric)
        return float(values[-1]) if len(values) else None

    def num_bytes(self) -> int:
        """Return the memory of all numbers, about."""
        cells = len(self.losses)
        for rows in self.stages.values():
            cells += len(rows.numbers) + sum(map(len, rows.columns.values()))
        return 8 * cells

    def furthest(self, key: str) -> int | None:
        """Return the newest value of a position, such as the number of epochs; None if no row has it."""
        found = [rows.columns[key][-1] for rows in self.stages.values() if rows.columns.get(key)]
        numbers = [value for value in found if math.isfinite(value)]
        return int(max(numbers)) if numbers else None

    def _is(self, key: str) -> bool:
        return key not in self.positions

    def _place(self, metric: str) -> tuple[str, str] | None:
        for stage, rows in self.stages.items():
            for key in rows.columns:
                if _public(stage, key) == metric and self._is(key):
                    return stage, key
        return None

    def _positions(self, rows: StageColumns, x: str, times: Mapping[int, float] | None) -> Numbers | None:
        if x == "time" and times is not None:
            start = min(times.values(), default=0.0)
            return np.array([times.get(number, math.nan) - start for number in rows.numbers])
        found = rows.column(x)
        if found is None and x == "row":
            found = np.asarray(rows.numbers, dtype=np.float64)
        if found is not None and x == "time":
            return found - (found[0] if len(found) else 0.0)
        return found

    def _positions_of_batches(self, x: str, number: int, times: Mapping[int, float] | None) -> Numbers:
        batches = np.arange(1, number + 1, dtype=np.float64)
        train = self.stages.get("train")
        if x in ("batches", "row") or train is None:
            return batches
        known, places = train.column("batches"), self._positions(train, x, times)
        if known is None or places is None:
            return batches if x == "updates" else np.full(number, np.nan)
        # Between two rows, batches are assumed to be equally far apart.
        is_known = ~np.isnan(known) & ~np.isnan(places)
        start = [] if x == "time" else [0.0]
        points, values = np.r_[start, known[is_known]], np.r_[start, places[is_known]]
        return np.interp(batches, points, values, left=math.nan, right=math.nan) if len(points) else batches


def _public(stage: str, key: str) -> str:
    return key if stage == CUSTOM else f"{stage}_{key}"


def rows_of(columns: Columns) -> Iterator[dict[str, Any]]:
    """Yield all rows of a run as dictionaries, in order, for a download."""
    found = []
    for stage, rows in columns.stages.items():
        for index, number in enumerate(rows.numbers):
            row: dict[str, Any] = {"stage": stage}
            for key, column in rows.columns.items():
                if index < len(column) and not math.isnan(column[index]):
                    row[key] = int(column[index]) if key in columns.positions and key != "time" else column[index]
            found.append((number, row))
    yield from (row for _, row in sorted(found, key=lambda each: each[0]))
