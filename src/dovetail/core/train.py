"""Reports of a script's training: metrics, progress and status as lines of a JSON file.

Every report is one line of `metrics.jsonl`, an object with the time and one of

    {"group": "validation", "steps_completed": 100, "metrics": {"loss": 0.5}}
    {"progress": 0.5}
    {"status": "downloading"}
    {"exited": "INVALID_HP"}
    {"alert": {"title": "slow", "description": "one batch took 90 s", "level": "warn"}}
    {"metadata": {"dataset": "digits"}}

A process that is killed loses at most the line that it was writing. A process that resumes from a checkpoint repeats
the reports after this checkpoint: of two lines with the same group and step the later one is valid.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.info import TrialInfo

METRICS = "metrics.jsonl"
"""The name of the file in the trial's folder."""

_logger = logging.getLogger("dovetail.core")
_ROW_KEYS = ("group", "progress", "status", "exited", "alert", "metadata")
_ACCEPTED = "numbers, tensors, arrays, text, and lists and dicts of them"

AlertLevel = Literal["debug", "info", "warn", "error"]
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class EarlyExitReason(enum.Enum):
    """Why a trial ends early."""

    INVALID_HP = "INVALID_HP"
    """The hyperparameters are invalid: a search replaces the trial by another one."""
    USER_REQUESTED_STOP = "USER_REQUESTED_STOP"
    """The user's code requested the end of the trial."""


ExitedReason = EarlyExitReason
"""The name of `EarlyExitReason` in messages of Determined's master."""


class TensorboardMode(enum.Enum):
    """How Determined uploads TensorBoard files. Here both modes leave the files in the trial's folder."""

    AUTO = "AUTO"
    MANUAL = "MANUAL"


class TrainContext:
    """Reports metrics, progress, status and alerts of a trial.

    The chief writes the reports. The other processes only check them.

    Args:
        directory: The trial's folder; created with the first report.
        is_chief: Whether this process writes the reports.
        info: The trial that this process was launched for; None means none.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> train = TrainContext(folder)
        >>> train.report_validation_metrics(10, {"loss": np.float32(0.5)})
        >>> row = read_metrics(folder / "metrics.jsonl")[0]
        >>> row["group"], row["steps_completed"], row["metrics"]
        ('validation', 10, {'loss': 0.5})
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, is_chief: bool = True, info: TrialInfo | None = None
    ) -> None:
        self.directory = Path(directory)
        self._is_chief = is_chief
        self._info = info
        self._is_open = False

    def report_training_metrics(
        self,
        steps_completed: int,
        metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Report metrics of the group `"training"`.

        Args:
            steps_completed: The number of steps so far.
            metrics: The metrics by name.
            batch_metrics: The metrics of each batch since the last report; they are recorded under `batch_metrics`.
                None means that they are not recorded.
        """
        batches = None if batch_metrics is None else [_checked(batch, "batch_metrics") for batch in batch_metrics]
        self._report("training", steps_completed, metrics, batches)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of the group `"validation"`."""
        self.report_metrics("validation", steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics.

        Args:
            group: The name of the group, such as `"training"`.
            steps_completed: The number of steps so far.
            metrics: Values by name: numbers, tensors, arrays, text, and lists and dicts of them.

        Raises:
            ConfigError: A value cannot be written as JSON.
        """
        self._report(group, steps_completed, metrics)

    def report_progress(self, progress: float) -> None:
        """Report the completed fraction of the work, from 0 to 1."""
        if not 0 <= progress <= 1:
            raise ConfigError(f"progress: expected a number from 0 to 1, got {progress}")
        self._write({"progress": float(progress)})

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Report why the trial ends early."""
        self._write({"exited": EarlyExitReason(reason).value})
        if self._is_chief:
            _logger.info("the trial exits early: %s", EarlyExitReason(reason).value)

    def set_status(self, status: str) -> None:
        """Report the current activity of the trial in a few words."""
        self._write({"status": str(status)})
        if self._is_chief:
            _logger.info("status: %s", status)

    def alert(
        self, title: str | None = None, description: str | None = None, level: AlertLevel | None = "info"
    ) -> None:
        """Log an alert and record it.

        Determined sends alerts to webhooks. Here every process logs its alerts, and the chief also records them.

        Args:
            title: A short text; None means no title.
            description: A longer text; None means no description.
            level: `"debug"`, `"info"`, `"warn"` or `"error"`; None means `"info"`.
        """
        level = level or "info"
        if level not in _LEVELS:
            raise UnknownNameError("level of an alert", level, _LEVELS)
        text = {"title": str(title or ""), "description": str(description or ""), "level": level}
        self._write({"alert": text})
        # Python hides records below WARNING by default, and alerts of other processes are only in the log.
        severity = _LEVELS[level] if self._is_chief else max(_LEVELS[level], logging.WARNING)
        _logger.log(severity, "alert: %s", ": ".join(filter(None, (text["title"], text["description"]))))

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the trial's metadata, which has no meaning for the library, and return it as it is recorded."""
        plain = _checked(metadata, "metadata")
        self._write({"metadata": plain})
        return plain

    def get_metadata(self) -> dict[str, Any] | None:
        """Return the last metadata given to `set_metadata`, also in an earlier run of the trial; None if never set."""
        path = self.directory / METRICS
        rows = read_metrics(path) if path.exists() else []
        return next((row["metadata"] for row in reversed(rows) if "metadata" in row), None)

    def get_experiment_best_validation(self) -> float | None:
        """Return this trial's best value of the searcher's metric so far; None if there is none.

        The section `searcher` of the experiment's configuration sets the metric and whether smaller is better.
        """
        searcher = self._info.config.get("searcher") if self._info is not None else None
        path = self.directory / METRICS
        if not isinstance(searcher, Mapping) or not path.exists():
            return None
        rows = [row["metrics"] for row in read_metrics(path) if row.get("group") == "validation"]
        values = [row[searcher["metric"]] for row in rows if searcher.get("metric") in row]
        # A metric may be text or a list in some reports.
        numbers = [float(value) for value in values if isinstance(value, (int, float)) and not math.isnan(value)]
        best = min if searcher.get("smaller_is_better", True) else max
        return best(numbers, default=None)

    def get_tensorboard_path(self) -> Path:
        """Return the folder for TensorBoard files; create it if it does not exist."""
        path = self.directory / "tensorboard"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def upload_tensorboard_files(
        self,
        selector: Callable[[Path], bool] | None = None,
        mangler: Callable[[Path, int], Path] | None = None,
    ) -> None:
        """Log the folder of the TensorBoard files; nothing is uploaded, because they remain in the trial's folder.

        Args:
            selector: Must be None: files cannot be selected.
            mangler: Must be None: files cannot be renamed.

        Raises:
            ConfigError: A selector or a mangler was given.
        """
        if selector is not None or mangler is not None:
            raise ConfigError(
                "upload_tensorboard_files: expected neither a selector nor a mangler, because no file is uploaded or "
                "renamed here: write only the wanted files into get_tensorboard_path()"
            )
        _logger.info("the TensorBoard files are in %s", self.get_tensorboard_path())

    def _report(
        self,
        group: str,
        steps_completed: int,
        metrics: Mapping[str, Any],
        batch_metrics: list[dict[str, Any]] | None = None,
    ) -> None:
        if not isinstance(group, str) or not group:
            raise ConfigError(f"group: expected a name, got {group!r}")
        if isinstance(steps_completed, bool) or not isinstance(steps_completed, int) or steps_completed < 0:
            raise ConfigError(f"steps_completed: expected a number of steps from 0 on, got {steps_completed!r}")
        plain = _checked(metrics, "metrics")
        row = {"group": group, "steps_completed": steps_completed, "metrics": plain}
        self._write(row if batch_metrics is None else {**row, "batch_metrics": batch_metrics})
        if self._is_chief:
            shown = ", ".join(f"{name} {value}" for name, value in plain.items())
            _logger.info("%s metrics at step %d: %s", group, steps_completed, shown)

    def _write(self, row: Mapping[str, Any]) -> None:
        if not self._is_chief:
            return
        path = self.directory / METRICS
        if not self._is_open:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Otherwise the first report of a resumed process would be appended to half a line, and both would be
            # lost.
            _end_at_a_line(path)
            self._is_open = True
        # NaN and infinity are text by now; other readers of JSON reject Python's constants.
        line = json.dumps({**row, "time": time.time()}, allow_nan=False) + "\n"
        # One write per line to a newly opened file, so that no other process sees or inherits half of a line.
        with path.open("ab", buffering=0) as file:
            file.write(line.encode())


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the reports in a file, in the order in which they were written.

    An incomplete last line is left out. JSON has no NaN and no infinity: in metrics the strings `"NaN"`, `"Infinity"`
    and `"-Infinity"` are read as numbers.

    Raises:
        DataError: A line is not a report of `TrainContext`.
    """
    # The last part is empty, or a line that is being written.
    *lines, _ = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{os.fspath(path)}:{number}: not valid JSON: {error}") from error
        if not isinstance(row, dict) or not any(key in row for key in _ROW_KEYS):
            raise DataError(f"{os.fspath(path)}:{number}: expected a report with one of {', '.join(_ROW_KEYS)}")
        for key in row.keys() & {"metrics", "batch_metrics", "metadata"}:
            row[key] = _numbers(row[key])
        rows.append(row)
    return rows


def _end_at_a_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed process has left."""
    if path.exists():
        with path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _checked(values: Any, name: str) -> dict[str, Any]:
    """Return values by name in a form that JSON can represent."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: expected values by name, got {type(values).__name__}")
    plain: dict[str, Any] = _plain(values, name)
    return plain


def _plain(value: Any, name: str) -> Any:
    """Return a value in a form that JSON can represent."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        # A tensor without dimensions becomes a number, others become lists.
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{name}: expected names that are text, got {key!r}")
        return {key: _plain(item, f"{name}.{key}") for key, item in value.items()}
    raise ConfigError(f"{name}: cannot report a {type(value).__name__} (accepted: {_ACCEPTED})")


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        return _SPELLED.get(value, value)
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return {name: _numbers(item) for name, item in value.items()} if isinstance(value, dict) else value
