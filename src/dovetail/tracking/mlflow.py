"""Logger for MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from dovetail.extras import require
from dovetail.printing import quiet
from dovetail.tracking.base import Logger, Run, Status, Value, sort

_TAG = "dovetail.run_id"


class MLflowLogger(Logger):
    """Log to MLflow: to an SQLite file by default, or to the store or server of the address.

    Histograms and figures are artifacts: `histograms/step.json`, `figures/name/step.png`. Characters that MLflow does
    not allow in the name of a metric become `_`. A resumed run continues MLflow's run; steps that it already has are
    not logged again.

    Needs the extra `mlflow`. `mlflow ui --backend-store-uri sqlite:///mlflow.db` shows the runs.

    Args:
        experiment: The name of the experiment; created if it does not exist.
        tracking_uri: The address of the store; None means the environment variable `MLFLOW_TRACKING_URI`, or else the
            file `mlflow.db` in the current folder.
        artifact_location: The folder or URL for the artifacts of a new experiment; None means MLflow's default.
        run_name: The name of new runs; None means a name that MLflow generates.
        tags: Further tags of the run.

    Attributes:
        run_id: The id of MLflow's run while one is open; else None.

    Example:
        >>> from dovetail.tracking import Tracker
        >>> tracker = Tracker(MLflowLogger("digits", tracking_uri="sqlite:///mlflow.db"))
    """

    def __init__(
        self,
        experiment: str = "dovetail",
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.artifact_location = artifact_location
        self.run_name = run_name
        self.tags = dict(tags or {})
        self.run_id: str | None = None
        self._client: Any = None
        self._known: dict[str, int] = {}

    def start(self, run: Run) -> None:
        # Read when the package is imported. Without it, the package sends usage reports to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = require("mlflow", "mlflow")
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        with quiet("mlflow", "alembic"):
            self._client = client = mlflow.MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(self.experiment)
            experiment = (
                client.create_experiment(self.experiment, artifact_location=self.artifact_location)
                if found is None
                else found.experiment_id
            )
        # MLflow chooses its own ids, so a tag identifies the run.
        known = client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{run.id}'") if run.is_resumed else []
        if known:
            self.run_id = known[0].info.run_id
            client.update_run(self.run_id, status="RUNNING")
            histories = (client.get_metric_history(self.run_id, name) for name in known[0].data.metrics)
            self._known = {history[0].key: max(metric.step for metric in history) for history in histories}
        else:
            tags = {**self.tags, _TAG: run.id}
            self.run_id, self._known = client.create_run(experiment, tags=tags, run_name=self.run_name).info.run_id, {}
        # MLflow does not allow changing a parameter, or more than a hundred at once.
        told = known[0].data.params if known else {}
        settings = {_allowed(name): str(value) for name, value in run.hyperparameters.items()}
        parameters = [mlflow.entities.Param(name, value) for name, value in settings.items() if name not in told]
        for first in range(0, len(parameters), 100):
            client.log_batch(self.run_id, params=parameters[first : first + 100])

    def log(self, values: Mapping[str, Value], step: int) -> None:
        found, now, entities = sort(values), int(time.time() * 1000), require("mlflow.entities", "mlflow")
        metrics = [
            entities.Metric(name, number, now, step)
            for name, number in ((_allowed(name), number) for name, number in found.numbers.items())
            # Otherwise MLflow would store a second value for the step.
            if step > self._known.get(name, -1)
        ]
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics)
        if found.histograms:
            content = {name: histogram.as_dict() for name, histogram in found.histograms.items()}
            self._client.log_dict(self.run_id, content, f"histograms/{step}.json")
        for name, figure in found.figures.items():
            self._client.log_figure(self.run_id, figure, f"figures/{name}/{step}.png")

    def finish(self, status: Status) -> None:
        client, run_id, self._client, self.run_id = self._client, self.run_id, None, None
        client.set_terminated(run_id, "FINISHED" if status == "finished" else "FAILED")


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)
