"""Logger for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dovetail.extras import require
from dovetail.tracking.base import Run, Status, Value, sort
from dovetail.tracking.files import InFolders


class TensorBoardLogger(InFolders):
    """Write event files that `tensorboard --logdir root` shows: scalars, histograms, images and hyperparameters.

    A resumed run continues in its folder; TensorBoard hides events after the step of its checkpoint.

    Needs the extra `tensorboard`.

    Args:
        root: The folder with the folders of all runs.
        label: The first part of a folder's name.

    Example:
        >>> from dovetail.tracking import Tracker
        >>> tracker = Tracker(TensorBoardLogger("runs"), histograms_every=100)
    """

    def __init__(self, root: str | os.PathLike[str] = "runs", label: str = "run") -> None:
        super().__init__(root, label)
        self._writer: Any = None

    def start(self, run: Run) -> None:
        require("tensorboard", "tensorboard")
        tensorboard = require("torch.utils.tensorboard", "tensorboard")
        # Hides events from this step on. Not in a new run, because it would also hide events without a step.
        purge_step = run.step + 1 if run.is_resumed else None
        self._writer = tensorboard.SummaryWriter(str(self._enter(run)), purge_step=purge_step)
        if not run.is_resumed:
            settings = {name: "None" if value is None else value for name, value in run.hyperparameters.items()}
            # Not `add_hparams`, which creates another run for them.
            for summary in tensorboard.summary.hparams(settings, {})[:2]:
                self._writer.file_writer.add_summary(summary)

    def log(self, values: Mapping[str, Value], step: int) -> None:
        found, writer = sort(values), self._writer
        for name, number in found.numbers.items():
            writer.add_scalar(name, number, step)
        for name, histogram in found.histograms.items():
            writer.add_histogram_raw(
                name,
                min=histogram.edges[0],
                max=histogram.edges[-1],
                num=histogram.counts.sum(),
                sum=histogram.sum,
                sum_squares=histogram.sum_squares,
                bucket_limits=histogram.edges[1:].tolist(),
                bucket_counts=histogram.counts.tolist(),
                global_step=step,
            )
        for name, figure in found.figures.items():
            # The figure belongs to the user, and may be shown or logged again.
            writer.add_figure(name, figure, step, close=False)

    def finish(self, status: Status) -> None:
        writer, self._writer = self._writer, None
        # Torch's summary reports success in any case, so its status is replaced.
        summary = require("torch.utils.tensorboard.summary", "tensorboard").hparams({}, {})[2]
        plugin = summary.value[0].metadata.plugin_data
        end = require("tensorboard.plugins.hparams.plugin_data_pb2", "tensorboard").HParamsPluginData()
        end.MergeFromString(plugin.content)
        statuses = require("tensorboard.plugins.hparams.api_pb2", "tensorboard")
        end.session_end_info.status = statuses.STATUS_SUCCESS if status == "finished" else statuses.STATUS_FAILURE
        plugin.content = end.SerializeToString()
        writer.file_writer.add_summary(summary)
        writer.close()
