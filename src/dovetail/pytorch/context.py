"""Context of a PyTorch trial: hyperparameters, devices, processes, wrapping and gradient steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.config import hyperparameters, locate
from dovetail.core import DistributedContext, storage_directory
from dovetail.core.distributed import local_device
from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.info import TrialInfo, get_cluster_info, note_hparams_read, unnoticed_hparams
from dovetail.pytorch.data import to_device
from dovetail.pytorch.hyperparameters import Hyperparameters, TrainingView, with_defaults
from dovetail.pytorch.lr_scheduler import LRScheduler
from dovetail.pytorch.reducer import MetricReducer, Reducers
from dovetail.trainers.randomness import seed_everything
from dovetail.units import check_count

if TYPE_CHECKING:
    from dovetail.pytorch.trainer import Trainer
    from dovetail.pytorch.trial import PyTorchTrial
    from dovetail.trainers.context import TrainingContext
    from dovetail.trainers.precision import PrecisionName

_Trial = TypeVar("_Trial", bound="PyTorchTrial")
_Module = TypeVar("_Module", bound=nn.Module)
_Optimizer = TypeVar("_Optimizer", bound=Optimizer)
_Scaler = TypeVar("_Scaler", bound=torch.amp.GradScaler)
ClipGradients = Callable[[Iterable[Tensor]], Any]


def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: DistributedContext | None = None,
    aggregation_frequency: int | None = None,
    enable_tensorboard_logging: bool = True,
    seed: int | None = None,
    checkpoint_dir: str | Path | None = "auto",
    verbose: bool = True,
) -> PyTorchTrialContext:
    """Seed all generators and return the context that trials are built with. It may be used in a `with` statement.

    Arguments that are None come from the launcher (`python -m dovetail.launch --config …`, a search), or else from
    the experiment configuration. For hyperparameters the launcher has priority over the argument: in an experiment
    every trial must train with the values that the search chose for it.

    Args:
        hparams: Hyperparameters by name, for a run without a launcher. In a run with a launcher or a search, these
            are only the defaults of the names that it does not give.
        exp_conf: An experiment configuration, as its YAML file has it.
        distributed: The processes of the run; None means those that a launcher started, or only this process.
        aggregation_frequency: Batches per update; None means the value of the configuration, which is 1 by default.
        enable_tensorboard_logging: Whether reported metrics are also written for TensorBoard, if it is installed.
        seed: Seed of python, numpy, torch and the order of the data; None means the configuration's seed, which
            is 0 by default, so that runs are reproducible.
        checkpoint_dir: Folder for checkpoints, with one subfolder per trial; `"auto"` means the folder of the
            launcher or the configuration, or else `checkpoints`; None means that no checkpoint is written.
        verbose: Whether to show progress.

    Example:
        >>> context = init(hparams={"learning_rate": 0.1}, checkpoint_dir=None)
        >>> context.training.hparams["learning_rate"]
        0.1
    """
    info = get_cluster_info()
    config: Mapping[str, Any] = exp_conf if exp_conf is not None else (info.config if info is not None else {})
    if hparams is None:
        hparams = {} if info is not None and exp_conf is None else hyperparameters(config)
    if info is not None:
        hparams = with_defaults(unnoticed_hparams(info), hparams)
    if seed is None:
        seed = info.trial_seed if info is not None else None
    if seed is None:
        seed = int(section(config, "reproducibility").get("experiment_seed", 0))
    optimizations = section(config, "optimizations")
    if aggregation_frequency is None:
        aggregation_frequency = optimizations.get("aggregation_frequency", 1)
    if isinstance(aggregation_frequency, bool) or not isinstance(aggregation_frequency, int):
        raise ConfigError(f"aggregation_frequency: expected a whole number, got {aggregation_frequency!r}")
    if aggregation_frequency < 1:
        raise ConfigError(f"aggregation_frequency: expected at least 1, got {aggregation_frequency}")
    if "records_per_epoch" in config:
        warnings.warn(
            "records_per_epoch is ignored: an epoch is a pass over the training data", UserWarning, stacklevel=2
        )
    context = PyTorchTrialContext(
        hparams=hparams,
        config=config,
        distributed=distributed or DistributedContext.from_environment(),
        aggregation_frequency=aggregation_frequency,
        averages_aggregated=bool(optimizations.get("average_aggregated_gradients", True)),
        seed=seed,
        info=info,
        checkpoint_root=checkpoint_root(checkpoint_dir, info, config),
        logs_tensorboard=enable_tensorboard_logging,
        verbose=verbose,
    )
    seed_everything(seed)
    return context


class PyTorchTrialContext:
    """The interface between a training script, its trials and the trainer.

    `dovetail.pytorch.init` returns it. A script uses it to build trials, train them and predict. A trial uses it to
    wrap models, optimizers and schedulers, and for backward passes and optimizer steps.

    Attributes:
        distributed: The processes of the run.
        device: The device of models and batches.
        hparams: Hyperparameters by name; the error for a missing name lists the ways to give it.
        unnoticed_hparams: The same mapping for internal use; reading it does not count as a read by the trial.
        models: The models given to `wrap_model`; similarly `optimizers` and `lr_schedulers`.
        experimental: `use_amp()` and other switches.
    """

    def __init__(
        self,
        *,
        hparams: Mapping[str, Any],
        config: Mapping[str, Any],
        distributed: DistributedContext,
        aggregation_frequency: int = 1,
        averages_aggregated: bool = True,
        seed: int = 0,
        info: TrialInfo | None = None,
        checkpoint_root: Path | None = None,
        logs_tensorboard: bool = False,
        verbose: bool = True,
    ) -> None:
        self.distributed = distributed
        self.device = local_device(distributed.local_rank)
        self.unnoticed_hparams = Hyperparameters(hparams)
        self.info = info
        self.aggregation_frequency = aggregation_frequency
        self.averages_aggregated = averages_aggregated
        self.checkpoint_root = checkpoint_root
        self.logs_tensorboard = logs_tensorboard
        self.verbose = verbose
        self._config = dict(config)
        self._seed = seed
        self._clear()

    def _clear(self) -> None:
        """Reset everything that a trial has wrapped, and its trainers."""
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.lr_schedulers: list[LRScheduler] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.reducers = Reducers()
        self.experimental = Experimental(self)
        self.profiler_settings: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.summed: list[Optimizer] = []
        self.clips: dict[Optimizer, ClipGradients | None] = {}
        self._trainers: list[tuple[PyTorchTrial, Trainer]] = []
        self._training: TrainingContext | None = None
        self._writer: Any = None
        self._initial_batch = 0
        self._warned_types: set[type] = set()
        self._stops_early = False

    def __enter__(self) -> PyTorchTrialContext:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.distributed.close(error)

    # ------------------------------------------------------------------ for a script

    @property
    def training(self) -> TrainingView:
        """Hyperparameters for a training script, as `context.training.hparams`; raises in a job that does not train."""
        if self.info is not None and self.info.kind == "job":
            raise ConfigError(
                "context.training is not available: this process runs a job, not a training; see context.config_data"
            )
        return TrainingView(self)

    @property
    def config_data(self) -> dict[str, Any]:
        """The section `data` of the configuration, with any content."""
        return dict(section(self._config, "data"))

    def build_trial(self, trial_class: type[_Trial], **kwargs: Any) -> _Trial:
        """Return a trial, built with a copy of this context and the keyword arguments of its constructor."""
        context = copy.copy(self)
        context._clear()
        return trial_class(context, **kwargs)

    def fit(self, trial: PyTorchTrial, train_data: Any = None, val_data: Any = None, **settings: Any) -> dict[str, Any]:
        """Train a trial and return the metrics of its last validation.

        Args:
            trial: A trial that `build_trial` returned, or that was built with this context.
            train_data: Training batches in place of those that the trial builds.
            val_data: Validation batches in place of those that the trial builds.
            settings: Arguments of `Trainer.fit`: `max_length`, `validation_period`, `checkpoint_period`, ….
        """
        return self._trainer(trial).fit(train_data=train_data, val_data=val_data, **settings)

    train = fit

    def predict(self, trial: PyTorchTrial, data: Any) -> Any:
        """Return the outputs of `trial.predict_batch` for all of `data`, joined, in the order of the data.

        Several processes share the batches, and each process returns all predictions. If the trial does not define
        `predict_batch`, the outputs of `evaluate_batch` are returned.
        """
        return self._trainer(trial).predict(data)

    def load_checkpoint_trial(
        self, trial_class: type[_Trial], trial_id: int | None = None, path: str | Path | None = None, **kwargs: Any
    ) -> _Trial:
        """Return a trial with the weights of a checkpoint, given by a path or as the best one of a trial.

        Args:
            trial_class: The class of the trial. A class name in a file is never imported.
            trial_id: The trial whose best checkpoint, or else newest checkpoint, is loaded.
            path: The path of the checkpoint to load.
            kwargs: Further arguments of the trial's constructor.
        """
        from dovetail.pytorch.loading import checkpoint_of, load_into

        if (trial_id is None) == (path is None):
            given = "neither" if path is None else "both"
            raise ConfigError(f"load_checkpoint_trial: expected either a trial_id or a path, got {given}")
        found = Path(path) if path is not None else checkpoint_of(self.checkpoint_root, int(trial_id or 0))
        return load_into(self, trial_class, found, kwargs)

    # ------------------------------------------------------------------ wrapping

    def wrap_model(self, model: _Module) -> _Module:
        """Register a model and return it on the device. Call this before creating optimizers of its parameters."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"wrap_model: expected a torch module, got {model!r}")
        if all(known is not model for known in self.models):
            self.models.append(model)
        return model.to(self.device)

    def wrap_optimizer(
        self,
        optimizer: _Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> _Optimizer:
        """Register an optimizer, and return it.

        Args:
            optimizer: An optimizer of parameters of wrapped models.
            backward_passes_per_step: Ignored: any number of backward passes works.
            fp16_compression: Not supported: True gives a warning, and gradients are sent in full precision.
            average_aggregated_gradients: Whether the gradients of batches that share an update are averaged (True)
                or summed (False); None means the value of the configuration, which averages by default.
        """
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"wrap_optimizer: expected a torch optimizer, got {optimizer!r}")
        wrapped = {id(parameter) for model in self.models for parameter in model.parameters()}
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in wrapped]
        if strangers:
            shape = tuple(strangers[0].shape)
            raise ConfigError(
                f"wrap_optimizer: a parameter of shape {shape} belongs to no wrapped model: call wrap_model first"
            )
        if fp16_compression:
            warnings.warn("fp16_compression: gradients are sent in full precision here", UserWarning, stacklevel=2)
        if all(known is not optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
        averages = self.averages_aggregated if average_aggregated_gradients is None else average_aggregated_gradients
        if not averages:
            self.summed.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1) -> LRScheduler:
        """Register a scheduler of a wrapped optimizer and return it as an `LRScheduler`.

        Args:
            lr_scheduler: A scheduler of torch.
            step_mode: When it steps. Per update means per real step of its optimizer. Steps per batch are made at
                the next update, all at once. Steps per epoch are made after the last update of the epoch.
            frequency: Step at every n-th epoch, batch or update.
        """
        wrapped = LRScheduler(lr_scheduler, step_mode, frequency)
        if all(known is not wrapped.optimizer for known in self.optimizers):
            raise ConfigError("wrap_lr_scheduler: its optimizer is not wrapped: call wrap_optimizer first")
        self.lr_schedulers.append(wrapped)
        return wrapped

    def wrap_scaler(self, scaler: _Scaler) -> _Scaler:
        """Register a gradient scaler of a trial that scales its losses and updates the scale itself.

        `step_optimizer(optimizer, scaler=scaler)` unscales, clips and steps.
        """
        if self.experimental.amp is not None:
            raise ConfigError("wrap_scaler: experimental.use_amp() already creates a scaler; use one of the two")
        self.scaler = scaler
        return scaler

    def configure_apex_amp(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: Apex is no longer maintained; torch itself has mixed precision."""
        raise ConfigError(
            "configure_apex_amp: Apex is not supported; call context.experimental.use_amp(), or wrap_scaler with a "
            "scaler of torch"
        )

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a metric over all processes: a `MetricReducer`, or a function of the list of all values.

        Args:
            reducer: A `MetricReducer`, or a function that gets all values that any process passed to `update`.
            name: The name of the metric; None means that the reducer returns a dict of metrics.
            for_training: Whether it is reported with training metrics.
            for_validation: Whether it is reported with validation metrics.
        """
        return self.reducers.wrap(reducer, name, for_training=for_training, for_validation=for_validation)

    # ------------------------------------------------------------------ in a batch

    def backward(
        self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Compute gradients of a loss, with the precision and the accumulation of the run."""
        if gradient is None and not retain_graph and not create_graph:
            self._run("backward").backward(loss)
        else:
            options = {"gradient": gradient, "retain_graph": retain_graph, "create_graph": create_graph}
            self._run("backward").backward(loss, **options)

    def step_optimizer(
        self,
        optimizer: Optimizer,
        clip_grads: ClipGradients | None = None,
        auto_zero_grads: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Clip and step an optimizer if the current batch completes an update; otherwise do nothing.

        Args:
            optimizer: A wrapped optimizer.
            clip_grads: Called with the parameters once their gradients are complete, averaged and unscaled, such as
                `lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0)`.
            auto_zero_grads: Whether gradients are cleared after the step.
            scaler: The wrapped scaler, if the trial scales its losses itself.
        """
        if scaler is not self.scaler:
            raise ConfigError(
                "step_optimizer: expected the scaler that wrap_scaler was given, "
                f"got {'none' if scaler is None else 'another one'}"
            )
        self.clips[optimizer] = clip_grads
        self._run("step_optimizer").step(optimizer, zero_grad=auto_zero_grads)

    def to_device(self, data: Any) -> Any:
        """Return data of any structure on the device, like `pytorch.to_device`."""
        return to_device(data, self.device, self._warned_types)

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of its epoch."""
        return self._run("is_epoch_start").progress.batch == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of its epoch; False if the data has no length."""
        context = self._run("is_epoch_end")
        trainer = context.run.trainer
        return trainer is not None and context.progress.batch + 1 == trainer.num_batches("train")

    def current_train_epoch(self) -> int:
        """Return the index of the current epoch, from 0."""
        return self._run("current_train_epoch").progress.epoch

    def current_train_batch(self) -> int:
        """Return the number of batches trained so far."""
        return self._run("current_train_batch").progress.batches

    def get_initial_batch(self) -> int:
        """Return the number of batches that were trained before this run."""
        return self._initial_batch

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Request that training ends after the current update, in every process.

        A request before training, such as one in the constructor of a trial, ends it after the first update.
        """
        if not isinstance(stop_requested, bool):
            raise ConfigError(f"set_stop_requested: expected True or False, got {stop_requested!r}")
        if self._training is None or self._training.run.trainer is None:
            self._stops_early = stop_requested
        elif stop_requested:
            self._training.stop("requested by the trial")
        elif self.get_stop_requested():
            raise ConfigError("set_stop_requested: a stop request cannot be withdrawn")

    def get_stop_requested(self) -> bool:
        """Return whether a stop of the training was requested."""
        if self._training is None or self._training.run.trainer is None:
            return self._stops_early
        run = self._training.run
        return self._stops_early or run.stop_reason is not None or run.stop_request is not None

    def apply_early_stop(self) -> None:
        """Apply a stop request that was made before training. The trainer calls this in each training step."""
        if self._stops_early:
            self._stops_early = False
            self.set_stop_requested(True)

    # ------------------------------------------------------------------ settings

    @property
    def hparams(self) -> Hyperparameters:
        """Hyperparameters by name; the error for a missing name lists the ways to give it."""
        note_hparams_read()
        return self.unnoticed_hparams

    @hparams.setter
    def hparams(self, hparams: Mapping[str, Any]) -> None:
        self.unnoticed_hparams = Hyperparameters(hparams)

    def get_hparams(self) -> dict[str, Any]:
        """Return all hyperparameters."""
        return self.hparams

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter."""
        return self.hparams[name]

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment configuration."""
        return self._config

    def get_data_config(self) -> dict[str, Any]:
        """Return the section `data` of the experiment configuration."""
        return self.config_data

    def get_global_batch_size(self) -> int:
        """Return the hyperparameter `global_batch_size`: the samples of one batch per process, over all processes."""
        size = self.hparams["global_batch_size"]
        check_count("global_batch_size", size)
        return int(size)

    def get_per_slot_batch_size(self) -> int:
        """Return the batch size of this process: its share of the global batch size."""
        return self.distributed.shard_batch_size(self.get_global_batch_size())

    def get_trial_seed(self) -> int:
        """Return the seed of this trial."""
        return self._seed

    def get_trial_id(self) -> int:
        """Return the number of this trial; 0 in a script without a launcher."""
        return self.info.trial_id if self.info is not None else 0

    def get_experiment_id(self) -> int:
        """Return the number of the experiment; 0 in a script without a launcher."""
        return (self.info.experiment_id if self.info is not None else None) or 0

    @property
    def directory(self) -> Path | None:
        """The folder for the checkpoints and metrics of this trial; None means that nothing is written."""
        if self.info is not None and self.info.directory is not None:
            return Path(self.info.directory)
        return None if self.checkpoint_root is None else self.checkpoint_root / f"trial_{self.get_trial_id()}"

    def get_tensorboard_path(self) -> Path:
        """Return the folder of this process's TensorBoard files."""
        rank = self.distributed.rank
        return (self.directory or Path()) / "tensorboard" / (f"rank_{rank}" if rank else "")

    def get_tensorboard_writer(self) -> Any:
        """Return the `SummaryWriter` of this process. It writes to `get_tensorboard_path()`."""
        if self._writer is None:
            require("tensorboard", "tensorboard")
            tensorboard = require("torch.utils.tensorboard", "tensorboard")
            self._writer = tensorboard.SummaryWriter(str(self.get_tensorboard_path()))
        return self._writer

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether reported metrics are written for TensorBoard."""
        return self.logs_tensorboard

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Enable or disable writing reported metrics for TensorBoard."""
        self.logs_tensorboard = enable_tensorboard_logging

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with `torch.profiler.profile(*args, **kwargs)`, with one profiler step per batch.

        Without an `on_trace_ready`, traces are written to the folder of `get_tensorboard_path`.
        """
        self.profiler_settings = (args, kwargs)

    # ------------------------------------------------------------------ for the trainer

    def attach(self, training: TrainingContext) -> None:
        """Connect `backward`, `step_optimizer` and similar methods to a run."""
        self._training = training

    def note_start(self) -> None:
        """Store the number of batches that were trained before this run."""
        self._initial_batch = self._run("get_initial_batch").progress.batches

    def close_writer(self) -> None:
        """Close the TensorBoard writer; a later run writes a new file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _trainer(self, trial: PyTorchTrial) -> Trainer:
        from dovetail.pytorch.trainer import Trainer

        # Stored in the trial's context, not here: otherwise this context would keep every trial alive.
        trainers = (trial.made_with or self)._trainers
        for known, trainer in trainers:
            if known is trial:
                return trainer
        built = Trainer(trial, self)
        trainers.append((trial, built))
        return built

    def _run(self, wanted: str) -> TrainingContext:
        if self._training is None:
            raise ConfigError(f"{wanted}: only available while a trial trains")
        return self._training


TrialContext = PyTorchTrialContext
"""The name that Determined uses for the context of a trial of any framework."""


class Experimental:
    """Switches of a trial, as `context.experimental`."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context
        self.amp: PrecisionName | None = None
        self.moves_batches = True

    def use_amp(self, precision: PrecisionName = "auto") -> None:
        """Train in mixed precision, with loss scaling if the precision needs it.

        Args:
            precision: `auto`, `bf16`, `fp16` or `fp32`.
        """
        if self._context.scaler is not None:
            raise ConfigError("use_amp: the trial has already wrapped a scaler; use one of the two")
        self.amp = precision

    def disable_auto_to_device(self) -> None:
        """Do not move batches to the device; the trial moves them with `context.to_device`."""
        self.moves_batches = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Do nothing: every loader is accepted."""


def checkpoint_root(given: str | Path | None, info: TrialInfo | None, config: Mapping[str, Any]) -> Path | None:
    """Return the folder that contains the trials' folders; None means that nothing is written."""
    if given is None:
        return None
    if given != "auto":
        return Path(given)
    if info is not None and info.directory is not None:
        return Path(info.directory).parent
    return storage_directory(config.get("checkpoint_storage") or "checkpoints")


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration; an empty mapping if it is missing or empty."""
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{locate(config, name)}: expected settings by name, got {found!r}")
    return found


def current_checkpoint(context: PyTorchTrialContext, given: Literal["auto"] | str | Path | None) -> str | Path | None:
    """Return the checkpoint to resume from: the caller's choice, or else the launcher's."""
    if given is not None:
        return given
    return context.info.latest_checkpoint if context.info is not None else None
