"""Logger for Comet: archives on this machine, or the service."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.printing import quiet
from dovetail.tracking.base import Histogram, Logger, Run, Status, Value, sort
from dovetail.tracking.hyperparameters import MASK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Read when the package is imported, except for the third and the fourth. Values of the user have priority.
_ENVIRONMENT = {
    # Otherwise the package sends reports about its own errors to Sentry.
    "COMET_ERROR_TRACKING_ENABLE": "false",
    # Otherwise it patches torch, scikit-learn and others, and complains that they were imported before.
    "COMET_DISABLE_AUTO_LOGGING": "1",
    # Otherwise it sends events about its use.
    "COMET_INTERNAL_REPORTING": "false",
    "COMET_DISABLE_ANNOUNCEMENT": "true",
    "COMET_LOGGING_CONSOLE": "CRITICAL",
}

# The package collects nothing itself unless `options` request it.
_MODEST: dict[str, Any] = {
    "auto_log_co2": False,
    "auto_metric_logging": False,
    "auto_output_logging": False,
    "auto_param_logging": False,
    "display_summary_level": 0,
    "log_code": False,
    "log_env_details": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "log_graph": False,
    "parse_args": False,
}


class CometLogger(Logger):
    """Log to archives on this machine, which `comet upload` sends later, or to Comet (`mode="online"`).

    Only `mode="online"` uses the network, even if the environment has a key. The package reports nothing about itself
    or the machine, unless `options` or variables of the environment request it: no code, arguments, output, git
    patches, packages or host details, and no errors to Sentry.

    Histograms and figures are Comet's histograms and images. Comet's histograms have fixed bins: the values of a bin
    are counted at its centre. The status of a run, `finished` or `failed`, is the field `status`. A resumed run has
    the same key and continues Comet's run. Offline it writes a further archive, without the values that earlier
    archives have; online, values of steps that are trained again are logged again.

    Comet writes an archive when the run ends: a process that is killed leaves an empty one.

    Needs the extra `comet`, and online a key: `comet login`, or the environment variable `COMET_API_KEY`.

    Args:
        project: The project; None means the one of the environment.
        mode: `"offline"` or `"online"`.
        folder: The folder for archives; None means the environment variable `COMET_OFFLINE_DIRECTORY`, or else
            `.cometml-runs` in the current folder.
        workspace: The workspace; None means the one of the environment.
        options: Further settings of `comet_ml.ExperimentConfig`: `name`, `tags`, `log_env_gpu`, …

    Attributes:
        run: The open experiment of the package comet_ml, for features that this class lacks; None if no run is open.
        path: The archive of the last run, which is complete when the run has ended; None if there is none.

    Example:
        >>> from dovetail.tracking import Tracker
        >>> tracker = Tracker(CometLogger("digits", name="first", tags=["baseline"]))
    """

    def __init__(
        self,
        project: str | None = None,
        mode: Literal["offline", "online"] = "offline",
        folder: str | os.PathLike[str] | None = None,
        workspace: str | None = None,
        **options: Any,
    ) -> None:
        if mode not in ("offline", "online"):
            raise ConfigError(f"CometLogger: mode: expected 'offline' or 'online', got {mode!r}")
        if "offline_directory" in options:
            raise ConfigError("CometLogger: give the folder of the archives as folder=, not as offline_directory=")
        if taken := sorted({"api_key", "experiment_key", "online"} & options.keys()):
            hint = "set COMET_API_KEY" if taken[0] == "api_key" else "it is set by the run and its mode"
            raise ConfigError(f"CometLogger: {taken[0]} is not an option: {hint}")
        self.project = project
        self.mode = mode
        self.folder = folder
        self.workspace = workspace
        self.options = options
        self.run: Any = None
        self.path: Path | None = None
        self._known: set[tuple[int, str]] = set()

    def start(self, run: Run) -> None:
        comet = _import_comet()
        key = comet.get_experiment_key(run.id)
        self.path, self._known = None, set()
        if self.mode == "online":
            self.run = self._open(comet, key)
        else:
            folder = Path(self.folder or comet.get_config("comet.offline_directory")).absolute()
            # With the permissions that the package gives it.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            earlier = set(folder.glob(f"{key}-*.zip"))
            if run.is_resumed:
                # The process that logged later steps has ended, and this run logs them again.
                self._known = {(step, name) for step, name in _logged(earlier) if step >= run.step}
            self.run = self._open(comet, key, offline_directory=str(folder))
            (self.path,) = set(folder.glob(f"{key}-*.zip")) - earlier
        with quiet("comet_ml", level=logging.CRITICAL):
            self.run.log_parameters(dict(run.hyperparameters), nested_support=False)

    def log(self, values: Mapping[str, Value], step: int) -> None:
        found = sort({name: value for name, value in values.items() if (step, name) not in self._known})
        with quiet("comet_ml", level=logging.CRITICAL):
            if found.numbers:
                self.run.log_metrics(found.numbers, step=step)
            for name, histogram in found.histograms.items():
                self.run.log_histogram_3d(_comet_histogram(histogram), name=name, step=step)
            for name, figure in found.figures.items():
                self.run.log_image(_picture(figure), name=name, step=step)

    def finish(self, status: Status) -> None:
        run, self.run = self.run, None
        with quiet("comet_ml", level=logging.CRITICAL):
            run.log_other("status", status)
            if self.mode == "offline":
                # `end` alone can drop the last message, and takes a second longer.
                run.streamer.stop()
                run.streamer.join()
            run.end()

    def _open(self, comet: Any, key: str, **settings: Any) -> Any:
        """Open the experiment with this key, or create it."""
        config = require("comet_ml.config", "comet")
        secret = config.get_api_key(None, config.get_config()) if self.mode == "online" else None
        if self.mode == "online" and not secret:
            raise ConfigError("CometLogger: mode 'online' needs a key: set COMET_API_KEY, or use mode='offline'")
        # The package ends its current experiment when it creates one, and reports unhandled errors to it.
        current = config.get_global_experiment()
        config.set_global_experiment(None)
        try:
            with quiet("comet_ml", level=logging.CRITICAL), _same_random_state():
                # Otherwise two processes with the same seed would choose the same name for their archives.
                random.seed()
                run = comet.start(
                    project_name=self.project,
                    workspace=self.workspace,
                    experiment_key=key,
                    # A resumed run adds to the experiment, whether it was uploaded or not.
                    mode="get_or_create",
                    online=self.mode == "online",
                    experiment_config=comet.ExperimentConfig(**{**_MODEST, **self.options, **settings}),
                )
        except Exception as error:
            # Comet's error for an invalid key contains the key.
            if secret and secret in str(error):
                raise ConnectionError(f"{type(error).__name__}: {str(error).replace(secret, MASK)}") from None
            raise
        finally:
            config.set_global_experiment(current)
        if not run.alive:
            raise ConnectionError("Comet did not start the run; COMET_LOGGING_CONSOLE=INFO shows its messages")
        # Otherwise the summary of the run is sent as a mail that names the user of this machine.
        run._report_summary = lambda: None
        return run


def _import_comet() -> Any:
    """Import comet_ml without its telemetry, its output and its hook for errors, unless the user has imported it."""
    if "comet_ml" not in sys.modules:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    hook = sys.excepthook
    try:
        # The import draws a random number.
        with _same_random_state():
            return require("comet_ml", "comet")
    finally:
        sys.excepthook = hook


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _logged(archives: Iterable[Path]) -> Iterator[tuple[int, str]]:
    """Yield the step and the name of every value in archives."""
    for path in archives:
        # The archive of a process that was killed is empty, or damaged if the process was writing it.
        with contextlib.suppress(zipfile.BadZipFile, KeyError), zipfile.ZipFile(path) as archive:
            for line in archive.read("messages.json").splitlines():
                payload = json.loads(line)["payload"]
                metric, upload = payload.get("metric"), payload.get("additional_params", {})
                if metric is not None:
                    yield metric["step"], metric["metricName"]
                elif name := upload.get("fileName") or upload.get("figName"):
                    yield upload["step"], name


def _comet_histogram(histogram: Histogram) -> Any:
    result = require("comet_ml", "comet").Histogram()
    result.add((histogram.edges[:-1] + histogram.edges[1:]) / 2, counts=histogram.counts)
    return result


def _picture(figure: Figure) -> io.BytesIO:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    content.seek(0)
    return content
