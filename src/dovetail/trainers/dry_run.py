"""Dry run of training: one update, one validation batch and one checkpoint, to find errors early."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dovetail.callbacks import Callback, Callbacks
from dovetail.data.named_sets import named_sets
from dovetail.errors import ConfigError, DataError
from dovetail.history import History
from dovetail.trainers.base import Trainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.explain import count_parameters
from dovetail.trainers.options import TrainerOptions
from dovetail.trainers.preserve_state import own_callbacks, preserve_state
from dovetail.trainers.rehearsal import EpochForecast, forecast_epoch
from dovetail.trainers.run_scope import reading_set
from dovetail.trainers.saving import Saver
from dovetail.units import Batches


def dry_run(
    trainer: Trainer,
    train_data: Any = None,
    val_data: Any = None,
    *,
    resume: str | Path | None = None,
    **requested: Any,
) -> History:
    """Try training with the real loop, restore the trainer, and report what was found.

    The trial trains one accumulation window (one batch without accumulation), validates one batch, and writes one
    checkpoint to a temporary folder. Only the callbacks of strategies and of the trainer's own class are called. The
    report is printed; a trainer that is not `verbose` only warns of problems.

    Args:
        trainer: The outermost layer.
        train_data: Training data; None means the data that the trainer already has.
        val_data: Validation data; None means the data that the trainer already has.
        resume: Rejected: a dry run tries the trainer in its current state.
        requested: Lengths and periods as for `fit`, for the time estimate.

    Returns:
        The history of the trial: the losses of its batches and the metrics of its validation.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> x, y = torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)
        >>> trainer = Trainer(torch.nn.Linear(4, 2), batch_size=4, verbose=False)
        >>> len(trainer.fit((x, y), (x, y), dry_run=True).losses), trainer.context.progress.batches
        (1, 0)
    """
    context = trainer.context
    if resume is not None:
        raise ConfigError("dry_run: cannot be combined with resume; load_checkpoint first, or leave resume out")
    if context.model is None:
        raise ConfigError("dry_run: the trainer has no model: give it one, Trainer(model, …)")
    for stage, source in {**context.run.data, **_given(train=train_data, valid=val_data)}.items():
        if isinstance(source, Iterator):
            raise DataError(
                f"dry_run: the {stage} data is a {type(source).__name__}, which can be read only once; "
                "give something that can be read again"
            )
    watch = _Watch()
    with preserve_state(trainer, train=train_data, valid=val_data), tempfile.TemporaryDirectory() as folder:
        # Before the data and the saver are replaced below, which would change the forecast.
        forecast = forecast_epoch(trainer, **requested)
        has_validation = _shorten_validation(trainer)
        context.callbacks = Callbacks([*own_callbacks(context), watch])
        context.run.saver = Saver(Path(folder))
        # One whole window, because only its last batch makes an update.
        num_batches = min(context.run.window.size, forecast.num_batches or context.run.window.size)
        moment = Batches(context.progress.batches + num_batches)
        # A trial is not worth a compiled step.
        context.run.is_trial = True
        try:
            history = trainer.fit(max_length=moment, validation_period=moment, checkpoint_period=moment)
        finally:
            context.run.is_trial = False
    problems = watch.problems(history, has_validation=has_validation)
    if _is_verbose(trainer):
        print(_report(context.model, history, watch, forecast, problems))
    else:
        for problem in problems:
            warnings.warn(f"dry run: {problem}", UserWarning, stacklevel=3)
    return history


class _Watch(Callback):
    """Measures the trial and collects problems."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.val_seconds: list[float] = []
        self.checkpoint_seconds = math.nan
        self.checkpoint_bytes = 0
        self._since = 0.0
        self._without_gradient: dict[str, nn.Parameter] = {}
        self._lacks_targets = False
        self._is_left_in_eval = False

    def on_train_start(self, context: TrainingContext) -> None:
        assert context.model is not None
        self._without_gradient = {name: it for name, it in context.model.named_parameters() if it.requires_grad}

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        core: Any = None if context.run.trainer is None else context.run.trainer.core
        self._lacks_targets |= core._split(batch)[1] is None
        self._since = time.perf_counter()

    def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
        self._look_for_gradients()

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        assert context.model is not None
        # Reading the loss waits for the device.
        float(output["loss"].detach())
        self.step_seconds.append(self._lap())
        # A step that calls `optimizer.step()` itself causes no `on_gradients`.
        self._look_for_gradients()
        self._is_left_in_eval |= not context.model.training
        self._since = time.perf_counter()

    def on_validation_start(self, context: TrainingContext) -> None:
        self._since = time.perf_counter()

    def on_test_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        self.val_seconds.append(self._lap())

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self._since = time.perf_counter()

    def on_checkpoint(self, context: TrainingContext, path: Path) -> None:
        self.checkpoint_seconds = self._lap()
        self.checkpoint_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def problems(self, history: History, *, has_validation: bool) -> list[str]:
        """Return one sentence for each probable mistake."""
        found = []
        if not all(math.isfinite(loss) for loss in history.losses):
            found.append(f"the loss is not finite: {list(history.losses)}")
        if self._without_gradient:
            found.append(f"no gradient reached {', '.join(self._without_gradient)}")
        if self._is_left_in_eval:
            found.append("the step left the model in evaluation mode")
        if self._lacks_targets:
            found.append("the training batch has no targets")
        if not has_validation:
            found.append("there is no validation data")
        return found

    def _lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def _look_for_gradients(self) -> None:
        # A parameter is removed once it had a gradient: a manual step may clear gradients before the next check.
        self._without_gradient = {name: it for name, it in self._without_gradient.items() if it.grad is None}


def _given(**data: Any) -> dict[str, Any]:
    return {stage: source for stage, source in data.items() if source is not None}


def _shorten_validation(trainer: Trainer) -> bool:
    """Reduce the validation data to one batch, and return whether there is one."""
    context = trainer.context
    if context.run.data.get("valid") is None:
        return False
    # A list of one batch is read as it is, by the real validation.
    sets = named_sets(context.run.data["valid"])
    if sets is None:
        first: Any = list(islice(trainer.batches("valid"), 1))
    else:
        first = {}
        for name, data in sets.items():
            with reading_set(context, "valid", name, data):
                first[name] = list(islice(trainer.batches("valid"), 1))
    context.run.data["valid"] = first or None
    return bool(first)


def _is_verbose(trainer: Trainer) -> bool:
    options = vars(trainer.core).get("options")
    return not isinstance(options, TrainerOptions) or options.verbose


def _report(model: nn.Module, history: History, watch: _Watch, forecast: EpochForecast, problems: list[str]) -> str:
    """Return the text that a dry run prints."""
    total, trainable = count_parameters(model)
    step, validation = _mean(watch.step_seconds), _mean(watch.val_seconds)
    rows = {
        "loss": f"{_mean(list(history.losses)):.6g}",
        "step": _seconds(step),
        "validation": f"{_seconds(validation)} per batch" if watch.val_seconds else "none",
        "checkpoint": f"{watch.checkpoint_bytes / 1000:,.1f} kB in {_seconds(watch.checkpoint_seconds)}",
        "parameters": f"{total:,}, {trainable:,} of them trainable",
        "one epoch": _estimate(step, validation, watch.checkpoint_seconds, forecast),
    }
    lines = [f"dry run: {len(watch.step_seconds)} training, {len(watch.val_seconds)} validation batch; state restored"]
    lines += [f"  {name:<11} {text}" for name, text in rows.items()]
    return "\n".join(lines + [f"  problem     {problem}" for problem in problems])


def _estimate(step: float, validation: float, checkpoint: float, forecast: EpochForecast) -> str:
    if forecast.num_batches is None:
        return "unknown, because the number of batches is unknown"
    seconds = step * forecast.num_batches + checkpoint * len(forecast.checkpoints or ())
    if forecast.validations and forecast.num_val_batches:
        seconds += validation * forecast.num_val_batches * forecast.validations
    return f"about {_seconds(seconds)}, if every step takes as long as the first"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"
