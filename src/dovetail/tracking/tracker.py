"""Callback that passes metrics, rates and histograms of training to loggers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dovetail.callbacks.base import Callback, Report
from dovetail.errors import ConfigError
from dovetail.history.lines import metrics_of
from dovetail.tracking.base import Histogram, Logger, Run, Status, Value, sort
from dovetail.tracking.hyperparameters import flatten, hyperparameters_of, without_passwords

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.optim import Optimizer

    from dovetail.trainers.context import TrainingContext
    from dovetail.units import Progress


class Tracker(Callback):
    """Log hyperparameters, metrics, learning rates and, on request, histograms and figures with any loggers.

    The step of all values is the number of trained batches. Metrics have the names of the history: `train_loss` and
    `epoch` after every epoch, `valid_loss` after every validation. In between, at every report of the loop, the running
    means of the epoch, `running_loss`, and the rates of the next update, `lr/group0`, are logged. The speeds that a
    `Timer(record=True)` adds to the history, `speed_samples_per_second`, are logged as well.

    A logger that fails gives one warning and is disabled for the rest of the run: tracking never stops training. Only
    the main process logs.

    A run that is resumed from a checkpoint continues the same run of every logger.

    Args:
        loggers: The loggers.
        hyperparameters: Further settings to log, nested to any depth. Values with names such as `api_key` or
            `password` are masked.
        histograms_every: Log histograms of all weights, and of their last gradients, after every n-th update; 0 means
            never.

    Example:
        >>> import json, tempfile, torch
        >>> from dovetail import Trainer
        >>> from dovetail.tracking import FolderLogger
        >>> x, y = torch.randn(32, 4), torch.zeros(32, dtype=torch.long)
        >>> logger = FolderLogger(tempfile.mkdtemp())
        >>> trainer = Trainer(torch.nn.Linear(4, 2), callbacks=[Tracker(logger)], num_epochs=1, verbose=False)
        >>> history = trainer.fit((x, y), (x, y))
        >>> rows = [json.loads(line) for line in (logger.path / "metrics.jsonl").read_text().splitlines()]
        >>> sorted({name for row in rows for name in row})
        ['epoch', 'lr/group0', 'running_loss', 'step', 'train_loss', 'valid_accuracy', 'valid_loss']
    """

    main_rank_only = True

    def __init__(
        self, *loggers: Logger, hyperparameters: Mapping[str, Any] | None = None, histograms_every: int = 0
    ) -> None:
        for logger in loggers:
            if not isinstance(logger, Logger):
                raise ConfigError(f"Tracker: expected loggers such as TensorBoardLogger('runs'), got {logger!r}")
        if isinstance(histograms_every, bool) or not isinstance(histograms_every, int) or histograms_every < 0:
            raise ConfigError(
                f"Tracker: histograms_every: expected a number of updates, 0 for never, got {histograms_every!r}"
            )
        self.loggers = loggers
        self.hyperparameters = dict(hyperparameters or {})
        self.histograms_every = histograms_every
        self._writing: list[Logger] = []
        self._progress: Progress | None = None
        self._gradients: dict[str, Histogram] = {}
        # Rows of the history that were checked for speeds.
        self._num_rows = 0

    def log(self, values: Mapping[str, Value], step: int | None = None) -> None:
        """Log further numbers, histograms and figures; call it while training runs, from a callback or a step.

        Args:
            values: Values by name; a `/` in a name makes a group.
            step: The step of the values; None means the number of trained batches. Services drop values out of order.
        """
        # Raise for a wrong value here: inside of `_log` it would only disable the logger.
        sort(values)
        if self._progress is None:
            # On other ranks no run is open, but a callback of the user may call this method there, too.
            if _is_main_rank():
                raise ConfigError("Tracker.log: no run is open: call it while training runs")
            return
        self._log(values, self._progress.batches if step is None else step)

    def log_figure(self, name: str, figure: Figure, step: int | None = None) -> None:
        """Log a matplotlib figure; see `log`."""
        self.log({name: figure}, step)

    def on_train_start(self, context: TrainingContext) -> None:
        if not self.loggers:
            warnings.warn(
                "Tracker has no loggers, so nothing is logged: give it one, such as FolderLogger('runs')",
                UserWarning,
                stacklevel=2,
            )
        hyperparameters = {**hyperparameters_of(context), **flatten(self.hyperparameters)}
        run = Run(context.run.id, context.progress.batches, hyperparameters)
        # Close the loggers of an earlier run, if it could not do so.
        self._close("failed")
        self._progress = context.progress
        self._num_rows = len(context.history)
        self._writing = list(self.loggers)
        for logger in self.loggers:
            self._attempt(logger, logger.start, run)

    def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
        """Store the distributions of the gradients, because they may be cleared after the step."""
        if self._histograms_due(context.progress.updates + 1):
            assert context.model is not None
            # With several optimizers, only the gradients of this one are complete now.
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for name, parameter in context.model.named_parameters():
                if id(parameter) in stepped and parameter.grad is not None:
                    self._gradients[f"gradients/{name}"] = Histogram(parameter.grad)

    def on_update(self, context: TrainingContext) -> None:
        """Log the histograms of an update that was not skipped."""
        if self._histograms_due(context.progress.updates):
            assert context.model is not None
            weights = {f"weights/{name}": Histogram(it) for name, it in context.model.named_parameters()}
            # The current batch is not counted yet, but it has made this update.
            self._log({**weights, **self._gradients}, context.progress.batches + 1)
        self._gradients = {}

    def on_report(self, context: TrainingContext, report: Report) -> None:
        running = {f"running_{name}": value for name, value in report.metrics.items()}
        self._log({**running, **_rates(context), **self._speeds(context)}, context.progress.batches)

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self._log(metrics, context.progress.batches)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        # Metrics of the validation were logged when it ended.
        own = {name: value for name, value in metrics.items() if not name.startswith("valid_")}
        self._log({"epoch": context.progress.epoch, **own, **self._speeds(context)}, context.progress.batches)

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        self._close("failed")

    def on_train_end(self, context: TrainingContext) -> None:
        # Of the last epoch, if the timer comes after this callback.
        if speeds := self._speeds(context):
            self._log(speeds, context.progress.batches)
        self._close("finished")

    def _speeds(self, context: TrainingContext) -> dict[str, float]:
        """Return the speeds that were added to the history since the last call."""
        rows, self._num_rows = context.history.rows[self._num_rows :], len(context.history)
        fresh = [metrics_of(row) for row in rows if row["stage"] == "speed"]
        return {name: value for metrics in fresh for name, value in metrics}

    def _histograms_due(self, update: int) -> bool:
        return bool(self._writing) and self.histograms_every > 0 and update % self.histograms_every == 0

    def _log(self, values: Mapping[str, Value], step: int) -> None:
        # A copy of the list, because `_attempt` removes a logger that fails.
        for logger in [*self._writing]:
            self._attempt(logger, logger.log, values, step)

    def _close(self, status: Status) -> None:
        for logger in [*self._writing]:
            self._attempt(logger, logger.finish, status)
        self._writing, self._progress, self._gradients = [], None, {}

    def _attempt(self, logger: Logger, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of a logger; after an error, warn and disable the logger for the rest of the run."""
        try:
            method(*arguments)
        except Exception as error:
            self._writing.remove(logger)
            if method == logger.log:
                # Save the values that were logged before.
                with suppress(Exception):
                    logger.finish("failed")
            warnings.warn(
                f"{type(logger).__name__} is disabled for the rest of this run, and training continues: "
                f"{method.__name__} failed with {type(error).__name__}: {_cause(error)}",
                UserWarning,
                stacklevel=2,
            )


def _rates(context: TrainingContext) -> dict[str, float]:
    return {
        f"lr/{f'optimizer{place}_' if place else ''}group{number}": float(group["lr"])
        for place, optimizer in enumerate(context.optimizers)
        for number, group in enumerate(optimizer.param_groups)
    }


def _cause(error: Exception) -> str:
    """Return the first sentence of a message, because some packages write long messages."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", without_passwords(str(error)))
    lines = (line.strip() for line in plain.splitlines())
    return next((line for line in lines if line and not line.startswith("---")), "no reason given")[:300]


def _is_main_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
