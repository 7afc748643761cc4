"""Runs for the page: their state, curves and summary, found in folders or given by trials of a store."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.history.journal import JournalReader, RunState, journal_path
from dovetail.history.metrics import mode_or_none
from dovetail.history.samples import samples_path
from dovetail.ui.columns import BATCH_LOSS, Columns, Numbers
from dovetail.ui.readers import HistoryReader, ReportsReader
from dovetail.ui.samples import SamplesReader
from dovetail.ui.series import downsample

SPARK_POINTS = 30
_SKIPPED = frozenset((".git", "__pycache__", "node_modules", "site-packages"))
_DEEPEST = 12
# Seconds after its last row in which a run without a journal counts as running.
_RECENT = 60.0


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run for a table.

    Attributes:
        key: The identifier of the run in addresses.
        name: The path of its folder below the given folder, or the number of a trial.
        group: The experiment that it belongs to; empty if none.
        state: Its state.
        started: The time of its first start; None if unknown.
        seconds: Its duration up to now or to its end; None if unknown.
        epochs: The number of finished epochs.
        batches: The number of batches.
        metric: The metric by which it is judged; empty if it has none.
        best: The best value of this metric.
        last: The newest value of this metric.
        spark: Some values of this metric, for a small picture.
        error: Why it failed, or why it cannot be read.
    """

    key: str
    name: str
    group: str
    state: RunState
    started: float | None = None
    seconds: float | None = None
    epochs: int | None = None
    batches: int | None = None
    metric: str = ""
    best: float | None = None
    last: float | None = None
    spark: tuple[float, ...] = ()
    error: str = ""


@dataclass
class Run:
    """A run that is followed.

    Attributes:
        key: The identifier of the run in addresses.
        name: A name for people.
        folder: The folder of its files.
        root: The folder that was given to the page, which no path may leave.
        reader: The reader of its metrics.
        journal: The reader of its journal; None for a trial.
        samples: The reader of its samples; None for a trial.
        group: The experiment that it belongs to; empty if none.
        version: Increases with every change.
    """

    key: str
    name: str
    folder: Path
    root: Path
    reader: HistoryReader | ReportsReader
    journal: JournalReader | None = None
    samples: SamplesReader | None = None
    group: str = ""
    version: int = 0
    used: float = 0.0
    trial_state: RunState | None = None
    trial_times: tuple[float | None, float | None] = (None, None)
    trial_settings: dict[str, Any] = field(default_factory=dict)
    trial_reason: str = ""
    is_read: bool = False
    is_released: bool = False
    _has_samples: bool = False
    _summary: tuple[int, RunSummary] | None = None
    _seen: tuple[Any, ...] = ()
    _state: RunState = "unknown"
    # Views load runs while the thread of the library polls them.
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def poll_journal(self) -> bool:
        """Read what is new in the journal, and return whether anything has changed."""
        if self.journal is None or not self.journal.update():
            return False
        self._state = self.state()
        self.version += 1
        return True

    def poll(self) -> bool:
        """Read what is new, and return whether anything has changed."""
        with self._lock:
            return self._poll()

    def _poll(self) -> bool:
        files = (self.reader, self.journal, self.samples)
        seen = tuple(None if each is None else _stamp(each.path) for each in files)
        changed = False
        if seen != self._seen or not self.is_read:
            self._seen = seen
            changed = self.reader.update() or not self.is_read
            self.is_released = False
            if self.journal is not None:
                changed = self.journal.update() or changed
            # The samples of a run that has ended are read when a view shows them.
            if self.samples is not None and (self.is_running or self._has_samples):
                changed = self._read_samples() or changed
            self.is_read = True
        state = self.state()
        if state != self._state:
            self._state, changed = state, True
        if changed:
            self.version += 1
        return changed

    def load(self) -> Columns:
        """Return all numbers of the run; they are read if they were not read yet, or if `release` has freed them."""
        with self._lock:
            # Otherwise the library could free the numbers while a view is being built from them.
            self.used = time.monotonic()
            if not self.is_read:
                self._poll()
            if self.is_released:
                self.is_released = False
                self.reader.update()
            return self.reader.columns

    def live(self) -> SamplesReader | None:
        """Return the samples of the run, read up to now; None for a trial."""
        if self.samples is not None:
            with self._lock:
                self._read_samples()
        return self.samples

    def _read_samples(self) -> bool:
        assert self.samples is not None
        self._has_samples = True
        return self.samples.update()

    def release(self) -> None:
        """Free the memory of the numbers; the summary is kept."""
        self.summary()
        with self._lock:
            self.reader.forget()
            if self.samples is not None:
                self.samples.restart()
            self.is_released, self._has_samples = True, False

    def state(self) -> RunState:
        """Return the state of the run."""
        if self.trial_state is not None:
            return self.trial_state
        if self.journal is None or not self.journal.start:
            stamp = _stamp(self.reader.path)
            is_recent = stamp is not None and time.time() - stamp[1] / 1e9 < _RECENT
            return "running" if is_recent else "unknown"
        return self.journal.state()

    @property
    def id(self) -> str:
        """A short form of the key, for addresses."""
        return short_id(self.key)

    @property
    def started(self) -> float:
        """The time of the first start, or else of the last change of the file."""
        if (started := self._times()[0]) is not None:
            return started
        stamp = _stamp(self.reader.path)
        return 0.0 if stamp is None else stamp[1] / 1e9

    @property
    def is_running(self) -> bool:
        """Whether the run worked when it was last polled."""
        return self._state == "running"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run by name."""
        return self.journal.settings if self.journal is not None else self.trial_settings

    @property
    def times(self) -> Mapping[int, float] | None:
        """The times of rows by their number; None means that the rows have their times."""
        if self.journal is None:
            return None
        start = self.journal.first_start
        # The time axis starts with the run, not with its first row.
        return self.journal.times if start is None else {0: start, **self.journal.times}

    def series(self, metric: str, x: str) -> tuple[Numbers, Numbers]:
        """Return the positions and values of a metric; see `Columns.series`."""
        self.used = time.monotonic()
        columns = self.load()
        if x == "samples":
            size = self.settings.get("batch_size")
            places, values = self.series(metric, "batches")
            if not isinstance(size, (int, float)) or isinstance(size, bool):
                return places[:0], values[:0]
            return places * float(size), values
        places, values = columns.series(metric, x, self.times)
        if metric != BATCH_LOSS:
            return places, values
        # The history has the losses of a running epoch only at its end; until then, their means are in the samples.
        later, means = self.sampled("loss", x, after=len(columns.losses))
        return np.r_[places, later], np.r_[values, means]

    def sampled(self, name: str, x: str, after: float = -1) -> tuple[Numbers, Numbers]:
        """Return the positions and values of a sampled number, such as `gradient_norm`.

        Args:
            name: The number.
            x: The unit of the positions, as in `series`; `time` is in seconds since the start.
            after: Only samples with more batches than this.
        """
        samples = self.live()
        batches, values, places = (None,) * 3 if samples is None else samples.columns("batches", name, x)
        if batches is None or values is None:
            return np.empty(0), np.empty(0)
        if x == "samples":
            size = self.settings.get("batch_size")
            places = batches * float(size) if isinstance(size, (int, float)) else None
        elif x == "epoch":
            # Between epochs, batches are assumed to be as many as in the epochs before.
            epochs, done = self.load().furthest("epoch"), self.load().furthest("batches")
            places = batches * epochs / done if epochs and done else None
        else:
            places = batches if x == "row" else places
            if x == "time" and places is not None:
                start = self.journal.first_start if self.journal is not None else None
                places = places - (start if start is not None else places[0])
        if places is None:
            return np.empty(0), np.empty(0)
        is_known = ~np.isnan(values) & ~np.isnan(places) & (batches > after)
        return places[is_known], values[is_known]

    def metrics(self) -> list[str]:
        """Return the names of all metrics, with the losses of batches as soon as a sample has them."""
        found = self.load().metrics()
        samples = self.live()
        has_loss = samples is not None and samples.last("loss") is not None
        return [*found, BATCH_LOSS] if has_loss and BATCH_LOSS not in found else found

    def summary(self) -> RunSummary:
        """Return what a table shows; it is computed again only after a change."""
        if self._summary is None or self._summary[0] != self.version:
            self._summary = self.version, self._summarize()
        found = self._summary[1]
        if found.state != "running":
            return found
        # The duration of a running run grows without a change of its files.
        return RunSummary(**{**vars(found), "seconds": self._seconds()})

    def _summarize(self) -> RunSummary:
        # A table of a thousand runs does not wait until all of them are read.
        columns = self.load() if self.is_released else self.reader.columns
        metric = main_metric(columns.metrics())
        values = columns.values(metric)
        mode = mode_or_none(metric) or "min"
        finite = values[abs(values) < math.inf]
        _, spark = downsample(values, values, SPARK_POINTS)
        started, _ = self._times()
        end = {} if self.journal is None else self.journal.end
        error = self.reader.problem or str(end.get("error") or self.trial_reason)
        return RunSummary(
            key=self.key,
            name=self.name,
            group=self.group,
            state=self.state(),
            started=started,
            seconds=self._seconds(),
            epochs=columns.furthest("epoch"),
            batches=max(columns.furthest("batches") or len(columns.losses), self._num_sampled()) or None,
            metric=metric,
            best=float(finite.min() if mode == "min" else finite.max()) if len(finite) else None,
            last=float(values[-1]) if len(values) else None,
            spark=tuple(float(f"{value:.4g}") for value in spark if math.isfinite(value)),
            error=error,
        )

    def _num_sampled(self) -> int:
        """Return the batches of the newest sample; 0 if the run has ended, or has none."""
        found = None if self.samples is None or not self.is_running else self.samples.last("batches")
        return int(found) if found is not None and math.isfinite(found) else 0

    def _times(self) -> tuple[float | None, float | None]:
        """Return when the run started and when it ended; None if unknown or still running."""
        if self.journal is None:
            return self.trial_times
        last = self.journal.end.get("end") or self.journal.last_sign
        return self.journal.first_start, last

    def _seconds(self) -> float | None:
        started, ended = self._times()
        if started is None:
            return None
        until = time.time() if self.state() == "running" else ended
        return None if until is None else max(0.0, until - started)


@functools.cache
def short_id(key: str) -> str:
    """Return a short identifier for a key, without special characters."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:10]


def main_metric(metrics: list[str]) -> str:
    """Return the metric by which a run is judged: an accuracy or loss of validation if there is one.

    Example:
        >>> main_metric(["train_loss", "train_lr", "valid_loss", "valid_accuracy"])
        'valid_accuracy'
    """
    for name in ("valid_accuracy", "valid_loss"):
        if name in metrics:
            return name
    others = [name for name in metrics if not name.startswith("train_") and name != BATCH_LOSS]
    for known in (others, metrics):
        for name in known:
            if mode_or_none(name) is not None:
                return name
    return metrics[0] if metrics else ""


@dataclass(frozen=True)
class FoundFolder:
    """A folder below a given one.

    Attributes:
        path: The folder.
        names: The names of its files and folders, without links.
        histories: Its history files.
    """

    path: Path
    names: frozenset[str]
    histories: tuple[Path, ...]


def find_folders(root: Path) -> Iterator[FoundFolder]:
    """Yield the folders below a folder, and the folder itself. Links are not followed; checkpoints are left out."""
    waiting = [(root, 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                found = {entry.name: entry for entry in entries if not entry.is_symlink()}
        except OSError:
            continue
        if "manifest.json" in found or "pyvenv.cfg" in found:
            continue
        histories = [name for name in sorted(found) if name.endswith(".jsonl") and "history" in name]
        yield FoundFolder(folder, frozenset(found), tuple(folder / name for name in histories if found[name].is_file()))
        if depth < _DEEPEST:
            below = sorted((name for name in found if name not in _SKIPPED), reverse=True)
            waiting += [(folder / name, depth + 1) for name in below if found[name].is_dir()]


def run_of(history: Path, root: Path, place: int = 0) -> Run:
    """Return the run of a history file below a folder.

    Args:
        history: The file.
        root: The folder that was given to the page.
        place: The number of this folder among all given ones.
    """
    folder = history.parent
    relative = folder.relative_to(root).as_posix()
    name = root.name if relative == "." else relative
    prefix = history.stem.removesuffix("history").rstrip("_")
    if prefix not in ("", "ck"):
        name = f"{name}/{prefix}"
    key = f"{place}:{history.relative_to(root).as_posix()}"
    journal = journal_path(history)
    samples = SamplesReader(samples_path(journal))
    return Run(key, name, folder, root, HistoryReader(history), JournalReader(journal), samples)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
