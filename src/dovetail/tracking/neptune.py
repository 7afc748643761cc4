"""Logger for Neptune."""

from __future__ import annotations

import json
import math
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
    """Log to Neptune, or to the folder `.neptune`, which `neptune sync` uploads later (`mode="offline"`).

    Numbers are series under their names, hyperparameters fields under `hyperparameters`, figures series of images.
    Neptune has no histograms: each is a JSON file under its name and step. NaN and infinities, which it rejects, are
    left out. A resumed run continues Neptune's run, which ignores steps that it already has.

    Needs the extra `neptune`, and online a token: the environment variable `NEPTUNE_API_TOKEN`, or `api_token`.

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
        with quiet("neptune"):
            self.run = neptune.init_run(
                **{**_MODEST, **self.options},
                project=self.project,
                api_token=self.api_token,
                mode=self.mode,
                custom_run_id=run.id,
            )
        if not run.is_resumed:
            for name, value in run.hyperparameters.items():
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
