"""Adapter that trains a PyTorch trial with the training loop."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail import checkpoint as store
from dovetail.callbacks import Callback, Profiler
from dovetail.checkpoint.manifest import USER
from dovetail.core import ExitedReason, TrainContext
from dovetail.errors import CheckpointError, ConfigError
from dovetail.pytorch.callback import PyTorchCallback, checked_callbacks, start_epoch
from dovetail.pytorch.context import PyTorchTrialContext, section
from dovetail.pytorch.data import DataLoader
from dovetail.pytorch.profiling import TorchProfiler
from dovetail.pytorch.reducer import as_scalar, described, reduce_validation
from dovetail.pytorch.trial import PyTorchTrial, check_methods, defines, takes_index
from dovetail.trainers import loop, run_scope
from dovetail.trainers.base import Trainer as AnyTrainer
from dovetail.trainers.context import BoundScheduler, Plan, Stage, TrainingContext
from dovetail.trainers.metrics import Meter
from dovetail.trainers.precision import Precision
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.units import Batches, Epochs, TrainUnit

CheckpointPolicy = Literal["best", "all", "none"]
Period = TrainUnit | Mapping[str, int] | None

AT_THE_END = Batches(sys.maxsize)
"""A period that is never reached: validation or saving then happens only at the end of training."""


@dataclass(frozen=True)
class FitOptions:
    """The options of a trial's `fit` that the `fit` of other trainers does not have."""

    reporting: TrainUnit = Batches(100)  # noqa: RUF009 - a value
    policy: CheckpointPolicy = "best"
    validates_first: bool = False
    is_test: bool = False
    profiles: bool = False
    source: Path | None = None


class TrialTrainer(SingleProcessTrainer):
    """The trainer of a trial, which calls its methods from the training loop; `Trainer` adds layers around it.

    Args:
        trial: The trial to train.
        context: The context that `pytorch.init` returned; used if the trial stored no context.
    """

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        if not isinstance(trial, PyTorchTrial):
            raise ConfigError(f"expected an instance of a PyTorchTrial, got {trial!r}")
        context = trial.made_with or context
        if not context.models:
            raise ConfigError(f"{type(trial).__name__} has no model: its constructor has to call context.wrap_model")
        check_methods(trial)
        self.trial = trial
        self.trial_context = context
        self.fit_options = FitOptions()
        self.trial_callbacks: dict[str, PyTorchCallback] = {}
        self._outputs: list[Mapping[str, Any]] = []
        self._sizes: list[int] = []
        self._index = count()
        self._takes_index = defines(trial, "evaluate_batch") and takes_index(trial)
        self._metrics: dict[str, Any] = {}
        self._profilers: list[Callback] = []
        self._reports: TrainContext | None = None
        self._warned_of: set[str] = set()
        super().__init__(
            context.models[0] if len(context.models) == 1 else nn.ModuleList(context.models),
            context.device,
            metrics={},
            seed=context.get_trial_seed(),
            accumulation_steps=context.aggregation_frequency,
            checkpoint_dir=context.directory or "checkpoints",
            save_every=0,
            verbose=context.verbose,
            **_searcher_metric(context.get_experiment_config()),
        )
        if context.scaler is not None:
            self.context.run.register("scaler", context.scaler)
        self._workload = _Workload(self)
        self.context.callbacks.add(self._workload)
        context.attach(self.context)

    def validation_metrics(self) -> dict[str, Any]:
        """Return the metrics of the last validation, by the names that the trial uses."""
        return dict(self._metrics)

    def report_invalid(self) -> None:
        """Record that the hyperparameters of the trial are invalid."""
        folder, chief = self.trial_context.directory, self.trial_context.distributed.is_chief
        if folder is not None and chief:
            TrainContext(folder, is_chief=True).report_early_exit(ExitedReason.INVALID_HP)

    # ------------------------------------------------------------------ overridden methods of the trainer

    def get_optimizer(self, model: nn.Module) -> Sequence[Optimizer]:
        if not self.trial_context.optimizers:
            raise ConfigError(f"{type(self.trial).__name__} has no optimizer: it has to call context.wrap_optimizer")
        return self.trial_context.optimizers

    def get_lr_scheduler(self, config: Mapping[str, Any], optimizer: Optimizer) -> list[BoundScheduler]:
        return [scheduler.bound() for scheduler in self.trial_context.lr_schedulers]

    def _loader(self, stage: Stage) -> Any:
        """Return the batches of a stage: the given data, or else the loader that the trial builds."""
        data, build = self.context.run.data, _BUILDERS.get(stage)
        if data.get(stage) is None and build is not None and defines(self.trial, build):
            data[stage] = getattr(self.trial, build)()
        source = data.get(stage)
        if isinstance(source, DataLoader):
            data[stage] = source.seeded(self.trial_context.get_trial_seed())
        return super()._loader(stage)

    # ------------------------------------------------------------------ verbs

    def plan(self, **periods: Period) -> Plan:
        """Return the plan of a fit. Without a period, validation and saving happen at the end."""
        context, ours = self.context, self.fit_options
        filled = {name: periods.get(name) or AT_THE_END for name in ("validation_period", "checkpoint_period")}
        if self.trial_context.directory is None:
            filled["checkpoint_period"] = Batches(0)
        plan = super().plan(max_length=periods.get("max_length"), **filled)
        if context.run.saver is not None:
            context.run.saver.keep_best = ours.policy == "best"
            context.run.saver.after_validation = ours.policy == "all"
        can_validate = context.run.data.get("valid") is not None or defines(self.trial, "build_validation_data_loader")
        evaluates = defines(self.trial, "evaluate_batch", "evaluate_full_dataset")
        if can_validate and not evaluates:
            raise ConfigError(
                f"{type(self.trial).__name__} has validation data but neither evaluate_batch nor evaluate_full_dataset"
            )
        if not can_validate:
            self._warn_of_no_validation(
                {"validation_period": periods.get("validation_period"), "step_zero_validation": ours.validates_first}
            )
        return replace(plan, validate=plan.validate if can_validate else None, validates_first=ours.validates_first)

    def setup(self) -> None:
        """Set up the trial's callbacks, data and gradient scaler."""
        context, trial_context = self.context, self.trial_context
        if trial_context.scaler is not None:
            context.precision = _OwnScaler(trial_context.scaler)
        if context.stage == "train":
            self._metrics = {}
            self.trial_callbacks = checked_callbacks(self.trial.build_callbacks())
            batches, name = self._origin()
            for callback in self.trial_callbacks.values():
                callback.on_trial_startup(batches, name)
            if trial_context.directory is not None and context.process.is_main:
                self._reports = TrainContext(trial_context.directory, is_chief=True)
            self._profilers = self._build_profilers()
            context.callbacks.add(*self._profilers)
            # Before the RNG of a checkpoint is restored, because building a loader may consume random numbers.
            self._loader("train")
        super().setup()

    def teardown(self, error: BaseException | None) -> None:
        context = self.context
        try:
            if context.stage == "train":
                for callback in self.trial_callbacks.values():
                    callback.on_trial_shutdown()
        finally:
            self.trial_context.close_writer()
            context.callbacks.remove(*self._profilers)
            self._profilers, self._reports = [], None
            if isinstance(context.precision, _OwnScaler):
                context.precision = None
            super().teardown(error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer, the trial and its callbacks."""
        state = super().state_dict()
        context = self.trial_context
        view = self._view(state)
        known = set(view)
        for callback in self.trial_callbacks.values():
            callback.on_checkpoint_save_start(view)
        return {
            **state,
            "trial": {
                "trial_type": "PyTorchTrial",
                "trial_id": context.get_trial_id(),
                "trial_class": f"{type(self.trial).__module__}:{type(self.trial).__qualname__}",
                "hparams": dict(context.unnoticed_hparams),
                "experiment_config": dict(context.get_experiment_config()),
                "code": _source(type(self.trial)),
                "num_models": len(context.models),
                "callbacks": {name: callback.state_dict() for name, callback in self.trial_callbacks.items()},
                "added": {name: value for name, value in view.items() if name not in known},
                "metrics": dict(self._metrics),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = state.get("trial")
        if own is None:
            raise CheckpointError("the checkpoint is of a trainer, not of a trial")
        view = {**self._view(state), **own["added"]}
        for callback in self.trial_callbacks.values():
            callback.on_checkpoint_load_start(view)
        super().load_state_dict(state)
        self._metrics = dict(own["metrics"])
        for name, callback in self.trial_callbacks.items():
            if own["callbacks"].get(name):
                callback.load_state_dict(own["callbacks"][name])

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the batches of a stage. An evaluation numbers its batches from 0."""
        batches = super().batches(stage)
        if stage == "train":
            return batches
        self._index = count()
        return islice(batches, 1) if self.fit_options.is_test and stage == "valid" else batches

    def train_epoch(self) -> Mapping[str, float] | None:
        """Run an epoch and call the trial's hooks before and after it."""
        context, callbacks = self.context, self.trial_callbacks.values()
        epoch = context.progress.epoch
        if context.progress.batch == 0:
            for callback in callbacks:
                start_epoch(callback, epoch)
        means = super().train_epoch()
        if not context.run.interrupted:
            # Before the validation, as in Determined; the loop would step them after it.
            for bound in context.schedulers:
                if bound.interval == "epoch":
                    bound.advance(1, None)
            for callback in callbacks:
                callback.on_training_epoch_end(epoch)
            self._workload.end_epoch(context)
        return means

    def val_epoch(self) -> Mapping[str, float] | None:
        """Validate, call the trial's hooks and return the reduced metrics."""
        reducers = self.trial_context.reducers
        if self._workload.is_between_reports:
            # This validation runs inside of a reporting period. Keep the values of the batches before it.
            with reducers.set_aside():
                return self._validate()
        metrics = self._validate()
        # Otherwise the next training report would count the updates of this validation.
        reducers.reset("train")
        return metrics

    def _validate(self) -> Mapping[str, float]:
        """Run a validation, report its metrics and return those that are numbers."""
        callbacks, reducers = self.trial_callbacks.values(), self.trial_context.reducers
        self._outputs, self._sizes = [], []
        reducers.reset("valid")
        for callback in callbacks:
            callback.on_validation_start()
        for callback in callbacks:
            callback.on_validation_epoch_start()
        if defines(self.trial, "evaluate_full_dataset"):
            metrics = self._evaluate_all()
        else:
            loop.val_epoch(self.context)
            for callback in callbacks:
                callback.on_validation_epoch_end(self._outputs)
            metrics = reduce_validation(self._outputs, self._sizes, self.trial.evaluation_reducer(), self._exchange)
        reduced = reducers.reduce("valid", self._exchange)
        for name in metrics.keys() & reduced.keys():
            raise ConfigError(f"the metric {name!r} comes both from the evaluation and from a reducer: rename one")
        self._metrics = metrics = {name: _on_host(value) for name, value in {**metrics, **reduced}.items()}
        self._check_searched(metrics)
        self._report("validation", metrics)
        for callback in callbacks:
            callback.on_validation_end(metrics)
        return {name: float(value) for name, value in metrics.items() if _is_number(value)}

    def to_device(self, batch: Any) -> Any:
        if not self.trial_context.experimental.moves_batches:
            return batch
        # Trials also get arrays moved.
        return self.trial_context.to_device(super().to_device(batch))

    def batch_length(self, batch: Any) -> int:
        """Return the number of samples that the trial counts in a batch."""
        return self.trial.get_batch_length(batch)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        progress = self.context.progress
        self.trial_context.apply_early_stop()
        if self.context.run.batch.is_idle:
            with self.trial_context.reducers.set_aside():
                output = self.trial.train_batch(batch, progress.epoch, progress.batches)
        else:
            output = self.trial.train_batch(batch, progress.epoch, progress.batches)
        return cast("Mapping[str, Any]", self._scalars({"loss": output} if isinstance(output, Tensor) else output))

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        output = self._evaluate(batch)
        if not isinstance(output, Mapping):
            raise ConfigError(f"evaluate_batch: expected metrics by name, got {type(output).__name__}")
        self._outputs.append(output)
        self._sizes.append(self.trial.get_batch_length(batch))
        return output

    def predict_step(self, batch: Any) -> Any:
        return self.trial.predict_batch(batch) if defines(self.trial, "predict_batch") else self._evaluate(batch)

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip gradients with the trial's function; first rescale them if the optimizer sums over batches."""
        super().clip_gradients(optimizer)
        context = self.trial_context
        window = self.context.run.window
        if window.num_batches > 1 and any(it is optimizer for it in context.summed):
            for parameter in _parameters(optimizer):
                if parameter.grad is not None:
                    # The loop has averaged over the batches of the window.
                    parameter.grad.mul_(window.num_batches)
        clip = context.clips.get(optimizer)
        if clip is not None:
            clip(_parameters(optimizer))

    def scheduler_step(self, interval: str, metrics: Mapping[str, float] | None = None) -> None:
        """Step schedulers after updates. Schedulers per epoch were already stepped before the validation."""
        if interval != "epoch":
            super().scheduler_step(interval, metrics)

    # ------------------------------------------------------------------ private

    def _warn_of_no_validation(self, options: Mapping[str, Any]) -> None:
        """Warn once about each option that has no effect without validation data."""
        for name, value in options.items():
            if value and name not in self._warned_of:
                self._warned_of.add(name)
                warnings.warn(
                    f"{name} has no effect: {type(self.trial).__name__} has no validation data; give val_data, or "
                    "define build_validation_data_loader",
                    UserWarning,
                    stacklevel=2,
                )

    def _scalars(self, output: Any) -> Any:
        """Convert the numbers in the output of `train_batch` to the form that a meter averages."""
        if not isinstance(output, Mapping):
            return output
        numbers = {name: as_scalar(value) for name, value in output.items()}
        for name, number in numbers.items():
            if number is None and name not in self._warned_of:
                self._warned_of.add(name)
                warnings.warn(
                    f"train_batch: the metric {name!r} is not reported: expected a number, got "
                    f"{described(output[name])}",
                    UserWarning,
                    stacklevel=2,
                )
        return {name: output[name] if number is None else number for name, number in numbers.items()}

    def _evaluate(self, batch: Any) -> Any:
        evaluate: Any = self.trial.evaluate_batch
        return evaluate(batch, next(self._index)) if self._takes_index else evaluate(batch)

    def _evaluate_all(self) -> dict[str, Any]:
        """Evaluate all data in the first process and send the metrics to the other processes."""
        trainer = cast(AnyTrainer, self.context.run.trainer)
        metrics: dict[str, Any] = {}
        if self.context.process.is_main:
            with run_scope.custom_evaluation(trainer, "valid"):
                metrics = dict(self.trial.evaluate_full_dataset(self._loader("valid")))
        return cast("dict[str, Any]", self._exchange(metrics)[0])

    def _exchange(self, value: Any) -> list[Any]:
        """Return the value of every process, in the order of the ranks."""
        return cast(AnyTrainer, self.context.run.trainer).gather([value])

    def _report(self, group: str, metrics: Mapping[str, Any]) -> None:
        """Write metrics to the trial's folder, in the first process."""
        context, progress = self.trial_context, self.context.progress
        if self._reports is None:
            return
        self._reports.report_metrics(group, progress.batches, {**metrics, "epochs": progress.epoch})
        if context.logs_tensorboard and importlib.util.find_spec("tensorboard") is not None:
            writer = context.get_tensorboard_writer()
            for name, value in metrics.items():
                if _is_number(value):
                    writer.add_scalar(f"{group}/{name}", float(value), progress.batches)

    def _report_progress(self) -> None:
        """Write the completed fraction of the training, in the first process."""
        context, plan = self.context, self.context.run.plan
        if self._reports is None or plan is None:
            return
        done: float = plan.max_length.count(context.progress)
        if isinstance(plan.max_length, Epochs):
            # The counter of epochs changes at the end of an epoch, but most reports are made inside of one.
            done += context.progress.batch / (cast(AnyTrainer, context.run.trainer).num_batches("train") or math.inf)
        self._reports.report_progress(min(done / max(plan.max_length.length, 1), 1.0))

    def _check_searched(self, metrics: Mapping[str, Any]) -> None:
        """Raise if the validation lacks the metric that selects the best checkpoint or guides the search."""
        wanted = self.options.best_metric
        if wanted is not None:
            name = wanted.removeprefix("valid_")
            if name not in metrics or not _is_number(metrics[name]):
                raise ConfigError(
                    f"searcher.metric: the validation has no number called {name!r} (it has: {', '.join(metrics)})"
                )
            return
        saver = self.context.run.saver
        if saver is not None and saver.keep_best and not {"loss", "accuracy"} & metrics.keys():
            saver.keep_best = False
            warnings.warn(
                "checkpoint_policy 'best' needs searcher.metric in the experiment configuration: the validation has "
                f"neither 'accuracy' nor 'loss' (it has: {', '.join(metrics)}); no best checkpoint is kept",
                UserWarning,
                stacklevel=2,
            )

    def _origin(self) -> tuple[int, str | None]:
        """Return the number of batches trained before this run, and the checkpoint to resume from."""
        source, saver = self.fit_options.source, self.context.run.saver
        if source is not None and str(source) == "auto":
            source = store.latest(saver.directory) if saver is not None and saver.directory.is_dir() else None
        if source is None:
            return self.context.progress.batches, None
        return store.inspect(source).step or 0, os.path.abspath(source)

    def _view(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's state with the keys that Determined passes to callbacks of trials."""
        models, optimizers = self.trial_context.models, state["optimizers"]
        model = state["model"]
        parts = [model] if len(models) == 1 else [_below(model, f"{number}.") for number in range(len(models))]
        return {
            "models_state_dict": parts,
            "optimizers_state_dict": optimizers,
            "lr_schedulers_state_dict": [each["scheduler"] for each in state["schedulers"]],
            "callbacks": {name: callback.state_dict() for name, callback in self.trial_callbacks.items()},
            "rng_state": state["rng"],
            "scaler_state_dict": state["participants"].get("scaler"),
        }

    def _build_profilers(self) -> list[Callback]:
        context, profilers = self.trial_context, list[Callback]()
        if self.fit_options.profiles:
            profilers.append(Profiler((context.directory or Path()) / "profile"))
        if context.profiler_settings is not None:
            profilers.append(TorchProfiler(context))
        return profilers


_BUILDERS = {"train": "build_training_data_loader", "valid": "build_validation_data_loader"}


class _Workload(Callback):
    """Reports the metrics of the batches between two reports, and passes them to the trial's callbacks."""

    def __init__(self, trainer: TrialTrainer) -> None:
        # A weak reference: the context outlives the trainer and holds this callback, so a strong one would be a cycle.
        self._trainer: TrialTrainer = weakref.proxy(trainer)
        self._meter = Meter()
        self._batches: list[dict[str, Any]] = []
        self._inside: list[TrainUnit] = []
        self._with_epoch: list[TrainUnit] = []
        self._before = trainer.context.progress.copy()

    def on_train_start(self, context: TrainingContext) -> None:
        plan = context.run.plan
        assert plan is not None
        units = [unit for unit in (self._trainer.fit_options.reporting, plan.validate, plan.save) if unit is not None]
        self._with_epoch = [unit for unit in units if isinstance(unit, Epochs)]
        self._inside = [unit for unit in units if not isinstance(unit, Epochs) and unit is not AT_THE_END]
        self._begin(context)
        self._trainer.trial_context.note_start()
        for callback in self._trainer.trial_callbacks.values():
            callback.on_training_start()

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        self._meter.add(output, context.run.batch.num_samples)
        if self._trainer.trial_callbacks and context.run.batch.num_samples:
            self._batches.append({name: _detached(value) for name, value in output.items() if _is_number(value)})
        plan, now = context.run.plan, context.progress
        assert plan is not None
        if (
            context.run.stop_reason is not None
            or plan.max_length.reached(now)
            or any(unit.due(self._before, now) for unit in self._inside)
        ):
            self._end(context)

    def on_checkpoint(self, context: TrainingContext, path: Path) -> None:
        callbacks = self._trainer.trial_callbacks.values()
        if not callbacks:
            return
        # Files that callbacks write here are stored in the checkpoint.
        own = path / USER
        own.mkdir()
        for callback in callbacks:
            callback.on_checkpoint_write_end(str(own))
        if not any(own.iterdir()):
            own.rmdir()
        if not self._is_followed(context, path):
            for callback in callbacks:
                callback.on_checkpoint_upload_end(os.path.abspath(path))

    @property
    def is_between_reports(self) -> bool:
        """Whether batches were trained since the last report."""
        context = self._trainer.context
        return context.stage == "train" and context.progress.batches != self._before.batches

    def end_epoch(self, context: TrainingContext) -> None:
        """Report if a period ends with the epoch that has just ended."""
        plan = context.run.plan
        assert plan is not None
        now = context.progress.copy()
        now.epoch += 1
        is_over = context.run.stop_reason is not None or plan.max_length.reached(now)
        if is_over or any(unit.due(self._before, now) for unit in self._with_epoch):
            self._end(context)
            self._before = now

    def _is_followed(self, context: TrainingContext, path: Path) -> bool:
        """Return whether a checkpoint is the best one and a periodic one of the same batch will be written next."""
        run = context.run
        if run.plan is None or run.saver is None or path != run.saver.best_path:
            return False
        return run.saver.owes or run.stop_reason is not None or run.plan.max_length.reached(context.progress)

    def _begin(self, context: TrainingContext) -> None:
        self._before = context.progress.copy()
        self._meter.reset()
        self._batches = []
        self._trainer.trial_context.reducers.reset("train")

    def _end(self, context: TrainingContext) -> None:
        trainer = self._trainer
        if context.progress.batches == self._before.batches:
            # This batch was already reported.
            return
        # A collective call: every process makes it at the same batch, even a process without callbacks.
        averages: dict[str, Any] = dict(cast(AnyTrainer, context.run.trainer).reduce(self._meter).compute())
        averages |= trainer.trial_context.reducers.reduce("train", trainer._exchange)
        trainer._report("training", averages)
        trainer._report_progress()
        batches = [{name: float(value) for name, value in batch.items()} for batch in self._batches]
        for callback in trainer.trial_callbacks.values():
            callback.on_training_workload_end(averages, batches)
        self._begin(context)


class _OwnScaler(Precision):
    """Precision of a trial with its own scaler: the trial scales losses and updates the scale."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__("fp32")
        self.scaler = scaler

    def start_run(self, *, is_new_run: bool) -> None:
        """Do nothing: the trial created the scaler."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged: the trial has scaled it."""
        return loss

    def update(self) -> None:
        """Do nothing: the trial updates the scale."""


def _searcher_metric(config: Mapping[str, Any]) -> dict[str, Any]:
    searcher = section(config, "searcher")
    if "metric" not in searcher:
        return {}
    mode = "min" if searcher.get("smaller_is_better", True) else "max"
    return {"best_metric": f"valid_{searcher['metric']}", "best_mode": mode}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _is_number(value: Any) -> bool:
    return as_scalar(value) is not None


def _on_host(value: Any) -> Any:
    """Return a metric as a Python number if it is one, and otherwise unchanged."""
    scalar = as_scalar(value)
    number = scalar.item() if isinstance(scalar, Tensor) else scalar
    # Reports store True as a word, not as the number 1.
    return value if number is None else int(number) if isinstance(number, bool) else number


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _source(cls: type[Any]) -> dict[str, str]:
    """Return the source file of a class by its name. Checkpoints contain it for readers; it is never run."""
    try:
        path = inspect.getsourcefile(cls)
        return {} if path is None else {Path(path).name: Path(path).read_text(encoding="utf-8")}
    except (OSError, TypeError, UnicodeDecodeError):
        return {}
