"""Logger for Trackio: an SQLite file on this machine."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.tracking.base import Logger, Run, Status, Value, sort

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TrackioLogger(Logger):
    """Log to Trackio, which stores runs in an SQLite file on this machine; `trackio show` displays them.

    The logger starts no server and uses no network: it ignores the environment variables `TRACKIO_SPACE_ID` and
    `TRACKIO_SERVER_URL`, and the token of Hugging Face. The files are in the folder of the environment variable
    `TRACKIO_DIR`, which the package reads when it is imported, or else in the cache of Hugging Face.

    Histograms and figures are Trackio's histograms and images. The status of a run, `finished` or `failed`, is an alert
    at its last step; Trackio also sends alerts to the address in `TRACKIO_WEBHOOK_URL`, if you set it. A resumed run
    continues Trackio's run; values that it already has are not logged again.

    Needs the extra `trackio`.

    Args:
        project: The project: letters, digits, `.`, `_` and `-`.
        name: The name of the run, of the same characters; None means its id.
        group: A group of runs.

    Attributes:
        run: The open run of the package trackio, for features that this class lacks; None if no run is open.

    Example:
        >>> from dovetail.tracking import Tracker
        >>> tracker = Tracker(TrackioLogger("digits", group="baseline"))
    """

    def __init__(self, project: str = "dovetail", name: str | None = None, group: str | None = None) -> None:
        # Both are parts of paths.
        for kind, value in {"project": project, "name": name}.items():
            if value is not None and not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", value):
                raise ConfigError(f"TrackioLogger: {kind}: expected letters, digits, '.', '_' and '-', got {value!r}")
        self.project = project
        self.name = name
        self.group = group
        self.run: Any = None
        self._known: set[tuple[int, str]] = set()

    def start(self, run: Run) -> None:
        trackio = require("trackio", "trackio")
        storage = require("trackio.sqlite_storage", "trackio").SQLiteStorage
        storage.validate_project_name(self.project)
        name = self.name or run.id
        self._known = set()
        if run.is_resumed:
            # The process that logged later steps has ended, and this run logs them again.
            rows = storage.get_logs(self.project, name, run_id=run.id)
            self._known = {(row["step"], key) for row in rows if row["step"] >= run.step for key in row}
        # Not `trackio.init`, which follows environment variables to a server, and ends the previous run of the process.
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = _local_run(trackio)(
                url=None,
                project=self.project,
                client=None,
                name=name,
                run_id=run.id,
                group=self.group,
                # Trackio reserves names that start with an underscore.
                config={re.sub("^_", "-_", key): value for key, value in run.hyperparameters.items()},
            )

    def log(self, values: Mapping[str, Value], step: int) -> None:
        found, trackio = sort(values), require("trackio", "trackio")
        logged = {
            **found.numbers,
            **{
                name: trackio.Histogram(np_histogram=(each.counts, each.edges))
                for name, each in found.histograms.items()
            },
            **{name: trackio.Image(_picture(figure)) for name, figure in found.figures.items()},
        }
        fresh = {name: value for name, value in logged.items() if (step, name) not in self._known}
        if fresh:
            self.run.log(fresh, step=step)

    def finish(self, status: Status) -> None:
        run, self.run = self.run, None
        level = require("trackio", "trackio").AlertLevel
        # Both methods print.
        with contextlib.redirect_stdout(io.StringIO()):
            run.alert(status, level=level.INFO if status == "finished" else level.ERROR)
            run.finish()


def _local_run(trackio: Any) -> Any:
    """Return trackio's class of runs without its request for the name of the user, which needs the network."""
    return type("LocalRun", (trackio.Run,), {"_get_username": lambda self: None})


def _picture(figure: Figure) -> Any:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return require("PIL.Image", "plot").open(content)
