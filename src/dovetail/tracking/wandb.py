"""Logger for Weights & Biases."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.tracking.base import Logger, Run, Status, Value, sort

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class WandBLogger(Logger):
    """Log to Weights & Biases, or to a folder that `wandb sync` uploads later (`mode="offline"`).

    A resumed run continues the run of Weights & Biases, which ignores steps that it already has.

    Needs the extra `wandb`, and online a key: `wandb login`, or the environment variable `WANDB_API_KEY`. The logger
    waits for a server that does not respond for `settings={"init_timeout": seconds}`, 90 seconds by default.

    Args:
        project: The project; None means the one of the environment.
        mode: `"online"` or `"offline"`; None means the one of the environment.
        options: Further arguments of `wandb.init`: `entity`, `name`, `tags`, `dir`, `settings`, …

    Attributes:
        run: The open run of the package wandb, for features that this class lacks; None if no run is open.

    Example:
        >>> from dovetail.tracking import Tracker
        >>> tracker = Tracker(WandBLogger("digits", mode="offline", tags=["baseline"]))
    """

    def __init__(
        self, project: str | None = None, mode: Literal["online", "offline", "disabled"] | None = None, **options: Any
    ) -> None:
        if taken := sorted({"id", "resume", "reinit", "config"} & options.keys()):
            raise ConfigError(f"WandBLogger: {taken[0]} is set by the run; give hyperparameters to Tracker")
        self.project = project
        self.mode = mode
        self.options = options
        self.run: Any = None

    def start(self, run: Run) -> None:
        if (self.mode or os.environ.get("WANDB_MODE")) == "offline":
            # Otherwise the package sends reports about its own errors.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = require("wandb", "wandb")
        given = self.options.get("settings", {})
        settings = given if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)
        if folder := self.options.get("dir"):
            os.makedirs(folder, exist_ok=True)
        self.run = wandb.init(
            **{
                **self.options,
                "project": self.project,
                "mode": self.mode,
                "id": run.id,
                # Continues the run with this id, or creates it.
                "resume": "allow",
                # Two trainers in one process have separate runs.
                "reinit": "create_new",
                "config": dict(run.hyperparameters),
                "settings": wandb.Settings(**{"silent": True, "console": "off", **settings}),
            }
        )

    def log(self, values: Mapping[str, Value], step: int) -> None:
        found, wandb = sort(values), require("wandb", "wandb")
        self.run.log(
            {
                **found.numbers,
                **{
                    name: wandb.Histogram(np_histogram=(each.counts, each.edges))
                    for name, each in found.histograms.items()
                },
                **{name: wandb.Image(_picture(figure)) for name, figure in found.figures.items()},
            },
            step=step,
        )

    def finish(self, status: Status) -> None:
        run, self.run = self.run, None
        run.finish(exit_code=0 if status == "finished" else 1)


def _picture(figure: Figure) -> Any:
    # With the figure itself, the package would import pyplot.
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return require("PIL.Image", "plot").open(content)
