"""Logger that writes runs as folders of plain files."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from abc import ABC
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from dovetail.checkpoint.files import damaged_name
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.history.lines import as_line, encode, write_atomically
from dovetail.tracking.base import Logger, Run, Status, Value, check_name, sort


class InFolders(Logger, ABC):
    """Base class of loggers that create a folder per run; the files of earlier runs are not changed.

    The name of a run's folder is its label and the first digits of its id, such as `run-3f2a9c1b`.
    """

    def __init__(self, root: str | os.PathLike[str], label: str) -> None:
        if "/" in check_name(label):
            raise ConfigError(f"{type(self).__name__}: label: expected one name without '/', got {label!r}")
        self.root = Path(root)
        self.label = label
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """The folder of the last run."""
        if self._path is None:
            raise ConfigError(f"{type(self).__name__} has no folder yet: it is created when training starts")
        return self._path

    def _enter(self, run: Run) -> Path:
        """Return the folder of a run, which already exists if the run is resumed."""
        self._path = self.root / f"{self.label}-{run.id[:8]}"
        self._path.mkdir(parents=True, exist_ok=True)
        return self._path


class FolderLogger(InFolders):
    """Write a run to plain files, which can be read without packages or services.

    The folder of a run (`logger.path`) contains

    - `run.json`: its id, its status (`running`, `finished`, `failed`) and the hyperparameters,
    - `metrics.jsonl`: an object for every step with values, `{"step": 10, "train_loss": 0.5}`; or
      `metrics.csv`: a line `step,name,value` for every number, which never needs a new column,
    - `histograms.jsonl`: the same with counts and edges, if there were histograms,
    - `figures/name/step.png`, if there were figures.

    JSON has no NaN and no infinity: they are written as `"NaN"`, `"Infinity"` and `"-Infinity"`. A resumed run
    continues its files; lines after the step of its checkpoint are dropped.

    Args:
        root: The folder with the folders of all runs.
        format: The format of the metrics: `"jsonl"` or `"csv"`.
        label: The first part of a folder's name.

    Example:
        >>> import tempfile
        >>> logger = FolderLogger(tempfile.mkdtemp(), format="csv")
        >>> logger.start(Run("3f2a9c"))
        >>> logger.log({"train_loss": 0.5, "epoch": 1}, step=10)
        >>> logger.finish("finished")
        >>> print((logger.path / "metrics.csv").read_text(), end="")
        step,name,value
        10,train_loss,0.5
        10,epoch,1.0
    """

    def __init__(
        self, root: str | os.PathLike[str] = "runs", format: Literal["jsonl", "csv"] = "jsonl", label: str = "run"
    ) -> None:
        if format not in ("jsonl", "csv"):
            raise UnknownNameError("format of FolderLogger", str(format), ("jsonl", "csv"))
        super().__init__(root, label)
        self.format = format
        self._run: Run | None = None

    def start(self, run: Run) -> None:
        """Create the folder, or truncate its files to the step of the resumed run."""
        folder, self._run = self._enter(run), run
        self._write_status("running")
        if self.format == "csv":
            # The killed process may have logged steps after its last checkpoint, which this run repeats.
            _cut(folder / "metrics.csv", lambda line: int(line.partition(",")[0]) <= run.step, "step,name,value\n")
        else:
            _cut(folder / "metrics.jsonl", lambda line: json.loads(line)["step"] <= run.step)
        if (folder / "histograms.jsonl").exists():
            _cut(folder / "histograms.jsonl", lambda line: json.loads(line)["step"] <= run.step)

    def log(self, values: Mapping[str, Value], step: int) -> None:
        found = sort(values)
        if found.numbers and self.format == "csv":
            text = io.StringIO(newline="")
            csv.writer(text, lineterminator="\n").writerows((step, *item) for item in found.numbers.items())
            _append(self.path / "metrics.csv", text.getvalue().encode())
        elif found.numbers:
            _append(self.path / "metrics.jsonl", as_line({"step": step, **found.numbers}))
        if found.histograms:
            counts = {name: histogram.as_dict() for name, histogram in found.histograms.items()}
            _append(self.path / "histograms.jsonl", as_line({"step": step, **counts}))
        for name, figure in found.figures.items():
            target = self.path / "figures" / check_name(name) / f"{step}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(target)

    def finish(self, status: Status) -> None:
        self._write_status(status)
        self._run = None

    def _write_status(self, status: str) -> None:
        assert self._run is not None
        hyperparameters = {name: encode(value) for name, value in self._run.hyperparameters.items()}
        content = {"id": self._run.id, "status": status, "hyperparameters": hyperparameters}
        text = json.dumps(content, indent=2, allow_nan=False)
        write_atomically(self.path / "run.json", f"{text}\n".encode())


def _append(path: Path, content: bytes) -> None:
    # Opened for each report, a few times per second at most, so that a killed process leaves an incomplete line only
    # in this moment, and no child process inherits the file.
    with path.open("ab") as file:
        file.write(content)


def _cut(path: Path, stays: Callable[[str], bool], head: str = "") -> None:
    """Keep the complete lines of a file that satisfy `stays`; create the file with its head if it does not exist."""
    lines, is_damaged = [], False
    if path.exists():
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for line in list(file)[1 if head else 0 :]:
                # A killed process may have left an incomplete last line.
                if line.endswith("\n"):
                    try:
                        lines += [line] if stays(line) else []
                    except (ValueError, TypeError, LookupError, RecursionError):
                        is_damaged = True
    if is_damaged:
        # A damaged line must not disable the logger in this and all later runs.
        damaged = damaged_name(path)
        path.rename(damaged)
        warnings.warn(f"{path} has damaged lines, which are left out; the file is kept as {damaged.name}", stacklevel=2)
    write_atomically(path, (head + "".join(lines)).encode())
