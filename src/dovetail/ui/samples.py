"""Samples of a run for the page: the loss inside of an epoch, the gradient norm, and the use of CPU, memory, device."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.history.journal import GrowingLines
from dovetail.ui.columns import Numbers, StageColumns

# Other keys of a line are ignored, so that a file cannot fill the memory with columns.
NAMES = (
    "time", "batches", "epoch", "updates", "loss", "lr", "gradient_norm", "cpu", "memory", "machine_cpu",
    "machine_memory", "machine_total", "device_memory", "device_total", "device_use",
)  # fmt: skip
_MOST = 200_000


class SamplesReader(GrowingLines):
    r"""Reads samples while they are written.

    Attributes:
        path: The file.
        rows: The samples, one column per name.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "ck_samples.jsonl"
        >>> _ = path.write_text('{"start": 5.0, "batches": 0}\n{"time": 7.0, "batches": 10, "loss": 0.5}\n')
        >>> reader = SamplesReader(path)
        >>> reader.update(), reader.series("loss", "batches")
        (True, (array([10.]), array([0.5])))
    """

    rows: StageColumns

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        super().__init__(path)

    def clear(self) -> None:
        self.rows = StageColumns()

    def take(self, row: dict[str, Any]) -> None:
        if "start" in row:
            self._cut(row.get("batches"))
        elif _is_place(row.get("time")) and _is_place(row.get("batches")) and len(self.rows.numbers) < _MOST:
            self.rows.add(len(self.rows.numbers) + 1, {name: row[name] for name in NAMES if name in row})

    def _cut(self, batches: Any) -> None:
        """Remove what a killed run had trained after the checkpoint from which it was resumed."""
        known = self.rows.columns.get("batches")
        if not isinstance(batches, (int, float)) or known is None:
            return
        columns = [self.rows.columns[name] for name in ("loss", "gradient_norm", "lr") if name in self.rows.columns]
        for index in range(len(known) - 1, -1, -1):
            if not known[index] > batches:
                return
            for column in columns:
                if index < len(column):
                    column[index] = math.nan

    def update(self) -> bool:
        # The thread that follows files and a view may read at the same time.
        with self._lock:
            return super().update()

    def restart(self, identity: tuple[int, int] | None = None) -> None:
        with self._lock:
            super().restart(identity)

    def columns(self, *names: str) -> list[Numbers | None]:
        """Return some columns of the same samples; None for a name that no sample has."""
        with self._lock:
            return [self.rows.column(name) for name in names]

    def series(self, name: str, x: str) -> tuple[Numbers, Numbers]:
        """Return positions, such as `time` or `batches`, and values; both are empty if there are none."""
        places, values = self.columns(x, name)
        if places is None or values is None:
            return np.empty(0), np.empty(0)
        is_known = ~np.isnan(values) & ~np.isnan(places)
        return places[is_known], values[is_known]

    def last(self, name: str) -> float | None:
        """Return the newest value; None if there is none."""
        _, values = self.series(name, "time")
        return float(values[-1]) if len(values) else None


def _is_place(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15
