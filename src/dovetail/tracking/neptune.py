"""Logger for Neptune, whose service closed in March 2026: offline files, and self-hosted servers."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.printing import quiet
from dovetail.tracking.base import Logger, Run, Status, Value, sort

# The package collects nothing itself unless `options` request it.
_MODEST: dict[str, Any] = {
    "capture_stdout": False,
    "capture_stderr": False,
    "capture_traceback": False,
    "capture_hardware_metrics": False,
    "git_ref": False,
    "source_files": [],
}


class NeptuneLogger(Logger):
    """Log to the folder `.neptune` in Neptune's format (`mode="offline"`), or to a self-hosted server of Neptune.

    Neptune's service closed in March 2026. Every other mode than `"offline"` and `"debug"` therefore gives a warning,
    and works only with a server of your own; `neptune sync` needs one, too. For new projects use another logger.

    Numbers are series under their names, hyperparameters fields under `hyperparameters`, figures series of images.
    Neptune has no histograms: each is a JSON file under its name and step. NaN and infinities, which it rejects, are
    left out. A resumed run continues Neptune's run, which ignores steps that it already has.

    Needs the extra `neptune`, and for a server a token: the environment variable `NEPTUNE_API_TOKEN`, or `api_token`.

    Args:
        project: The project, `workspace/name`; None means the one of the environment.
        api_token: The token; None means the one of the environment.
        mode: `"async"`, `"sync"` or `"offline"`; None means the one of the environment.
        options: Further arguments of `neptune.init_run`: `name`, `tags`, `capture_hardware_metrics`, …

    Attributes:
        run: The open run of the package neptune, for features that this class lacks; None if no run is open.

    Example:
        >>> from dovetail.tracking import Tracker
        >>> tracker = Tracker(NeptuneLogger("team/digits", mode="offline", tags=["baseline"]))
    """

    def __init__(
        self,
        project: str | None = None,
        api_token: str | None = None,
        mode: Literal["async", "sync", "offline", "debug"] | None = None,
        **options: Any,
    ) -> None:
        if taken := sorted({"custom_run_id", "with_id"} & options.keys()):
            raise ConfigError(f"NeptuneLogger: {taken[0]} is set by the run")
        self.project = project
        self.api_token = api_token
        self.mode = mode
        self.options = options
        self.run: Any = None

    def start(self, run: Run) -> None:
        neptune = require("neptune", "neptune")
        mode = self.mode or os.environ.get("NEPTUNE_MODE") or "async"
        if mode not in ("offline", "debug"):
            warnings.warn(
                f"NeptuneLogger: mode {mode!r} needs a server of your own, because Neptune's service closed in March "
                "2026; use mode='offline', or another logger such as TrackioLogger",
                UserWarning,
                stacklevel=2,
            )
        with quiet("neptune"):
            self.run = neptune.init_run(
                **{**_MODEST, **self.options},
                project=self.project,
                api_token=self.api_token,
                mode=self.mode,
                # Neptune continues the run with this id, or creates it.
                custom_run_id=run.id,
            )
        if not run.is_resumed:
            for name, value in run.hyperparameters.items():
                # Neptune has no fields without a value.
                self.run["hyperparameters"][name] = "None" if value is None else value

    def log(self, values: Mapping[str, Value], step: int) -> None:
        found, run = sort(values), self.run
        for name, number in found.numbers.items():
            if math.isfinite(number):
                run[name].append(number, step=step)
        if found.histograms or found.figures:
            file = require("neptune.types", "neptune").File
            for name, histogram in found.histograms.items():
                content = json.dumps(histogram.as_dict())
                run[f"{name}/{step}"].upload(file.from_content(content, extension="json"))
            for name, figure in found.figures.items():
                run[name].append(file.as_image(figure), step=step)

    def finish(self, status: Status) -> None:
        run, self.run = self.run, None
        with quiet("neptune"):
            run["sys/failed"] = status == "failed"
            run.stop()
