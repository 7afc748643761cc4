"""What a trial's code speaks to: hyperparameters, devices, processes, and the way to the trainer."""

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
from dovetail.pytorch.hyperparameters import Hyperparameters, TrainingView, filled
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
    """Seed everything, and return the context that trials are made with. It may be used in a `with` statement.

    What is not given comes from whoever launched the script (`python -m dovetail.launch --config …`, a search), and
    else from the experiment configuration. Hyperparameters are the other way round: in an experiment every trial must
    train with what the search chose for it.

    Args:
        hparams: Hyperparameters by name, for a run that nobody launched. Those that a launcher or a search gives win;
            these fill in what it does not name.
        exp_conf: An experiment configuration, as its YAML file has it.
        distributed: The processes of the run; None for those that a launcher started, or just this one.
        aggregation_frequency: Batches that share one update; None for that of the configuration, which is 1 by default.
        enable_tensorboard_logging: Whether reported metrics are also written for TensorBoard, if it is installed.
        seed: Of python, numpy, torch and the order of the data; None for that of the configuration, which is 0 by
            default: a run is reproducible unless it is told otherwise.
        checkpoint_dir: Where trials keep their checkpoints, each in a folder of its own; `"auto"` for the place of the
            launcher or the configuration, else `checkpoints`; None to keep nothing.
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
        hparams = filled(unnoticed_hparams(info), hparams)
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
            "records_per_epoch means nothing here: an epoch is a pass over the training data", UserWarning, stacklevel=2
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
    """The one object that a training script and the trials in it speak to.

    Made by `dovetail.pytorch.init`. A script builds trials with it, trains them and predicts. A trial wraps its
    models, optimizers and schedulers with it, and differentiates and steps through it.

    Attributes:
        distributed: The processes of the run.
        device: Where models and batches are.
        hparams: Hyperparameters by name; one that is missing is an error that says how to give it.
        unnoticed_hparams: The same for the library's own use, which does not count as reading by the trial.
        models: What `wrap_model` was given, and so `optimizers` and `lr_schedulers`.
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
        """Forget what a trial has wrapped, and who trained it."""
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
        """What a training script asks for first: `context.training.hparams`; not there in a job that does not train."""
        if self.info is not None and self.info.kind == "job":
            raise ConfigError(
                "context.training is not available: this is a job, not a training; see context.config_data"
            )
        return TrainingView(self)

    @property
    def config_data(self) -> dict[str, Any]:
        """The `data` of the configuration: anything that the user put there."""
        return dict(section(self._config, "data"))

    def build_trial(self, trial_class: type[_Trial], **kwargs: Any) -> _Trial:
        """Return a trial, made with a context of its own and further arguments, if it takes any."""
        context = copy.copy(self)
        context._clear()
        return trial_class(context, **kwargs)

    def fit(self, trial: PyTorchTrial, train_data: Any = None, val_data: Any = None, **settings: Any) -> dict[str, Any]:
        """Train a trial and return the metrics of its last validation.

        Args:
            trial: Made by `build_trial`, or with this context.
            train_data: Training batches in place of those that the trial builds.
            val_data: Validation batches in place of those that the trial builds.
            settings: What `Trainer.fit` takes: `max_length`, `validation_period`, `checkpoint_period`, ….
        """
        return self._trainer(trial).fit(train_data=train_data, val_data=val_data, **settings)

    train = fit

    def predict(self, trial: PyTorchTrial, data: Any) -> Any:
        """Return what `trial.predict_batch` returns for all of `data`, joined, in its order.

        Several processes share the batches, and each gets all predictions. Without `predict_batch`, what
        `evaluate_batch` returns.
        """
        return self._trainer(trial).predict(data)

    def load_checkpoint_trial(
        self, trial_class: type[_Trial], trial_id: int | None = None, path: str | Path | None = None, **kwargs: Any
    ) -> _Trial:
        """Return a trial with the weights of a checkpoint: of the best one of a trial, or the one at a path.

        Args:
            trial_class: What to make. It is never looked up by a name in a file.
            trial_id: Whose best checkpoint, else its newest, is loaded from the folder of checkpoints.
            path: Which checkpoint is loaded.
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
        """Register a model, and return it on the device. Call it before making optimizers of its parameters."""
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
            optimizer: Of the parameters of wrapped models.
            backward_passes_per_step: Any number works; it need not be said.
            fp16_compression: Gradients are never compressed here; asking for it is warned about.
            average_aggregated_gradients: Whether the gradients of batches that share an update are averaged, or with
                False summed; None for that of the configuration, which averages by default.
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
        """Register a scheduler of a wrapped optimizer, and return it with its way of stepping.

        Args:
            lr_scheduler: A scheduler of torch.
            step_mode: When it steps. Updates are real steps of its optimizer; batches that share an update are caught
                up at it; an epoch ends with its last update.
            frequency: Step at every n-th of these.
        """
        wrapped = LRScheduler(lr_scheduler, step_mode, frequency)
        if all(known is not wrapped.optimizer for known in self.optimizers):
            raise ConfigError("wrap_lr_scheduler: its optimizer is not wrapped: call wrap_optimizer first")
        self.lr_schedulers.append(wrapped)
        return wrapped

    def wrap_scaler(self, scaler: _Scaler) -> _Scaler:
        """Register a gradient scaler that the trial uses by itself: it scales losses and updates the scale.

        `step_optimizer(optimizer, scaler=scaler)` unscales, clips and steps.
        """
        if self.experimental.amp is not None:
            raise ConfigError("wrap_scaler: experimental.use_amp() has a scaler of its own; use one of the two")
        self.scaler = scaler
        return scaler

    def configure_apex_amp(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: Apex is no longer maintained; torch itself has mixed precision."""
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
        """Register a metric that is computed over all processes: a `MetricReducer`, or a function of all values.

        Args:
            reducer: An object, or a function that gets everything that was given to `update` in any process.
            name: Of the metric; None where the reducer returns several by name.
            for_training: Whether it is reported with training metrics.
            for_validation: Whether it is reported with validation metrics.
        """
        return self.reducers.wrap(reducer, name, for_training=for_training, for_validation=for_validation)

    # ------------------------------------------------------------------ in a batch

    def backward(
        self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Differentiate a loss, in the precision and the window of batches that the run has."""
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
        """Clip and step an optimizer, when the batches that share an update are complete; before, do nothing.

        Args:
            optimizer: A wrapped one.
            clip_grads: Called with the parameters once their gradients are complete, averaged and unscaled, such as
                `lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0)`.
            auto_zero_grads: Whether gradients are cleared after the step.
            scaler: The wrapped scaler, where the trial scales by itself.
        """
        if scaler is not self.scaler:
            raise ConfigError(
                "step_optimizer: expected the scaler that wrap_scaler was given, "
                f"got {'none' if scaler is None else 'another one'}"
            )
        self.clips[optimizer] = clip_grads
        self._run("step_optimizer").step(optimizer, zero_grad=auto_zero_grads)

    def to_device(self, data: Any) -> Any:
        """Return data of any structure on the device, as `pytorch.to_device` does."""
        return to_device(data, self.device, self._warned_types)

    def is_epoch_start(self) -> bool:
        """Whether the running batch is the first of its epoch."""
        return self._run("is_epoch_start").progress.batch == 0

    def is_epoch_end(self) -> bool:
        """Whether the running batch is the last of its epoch, where the data has a length."""
        context = self._run("is_epoch_end")
        trainer = context.run.trainer
        return trainer is not None and context.progress.batch + 1 == trainer.num_batches("train")

    def current_train_epoch(self) -> int:
        """The running epoch, from 0."""
        return self._run("current_train_epoch").progress.epoch

    def current_train_batch(self) -> int:
        """Batches that training has done."""
        return self._run("current_train_batch").progress.batches

    def get_initial_batch(self) -> int:
        """Batches that were done when this training began."""
        return self._initial_batch

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Request that training ends after the running update, in every process.

        A request before training, such as one in the constructor of a trial, ends it after the first update.
        """
        if not isinstance(stop_requested, bool):
            raise ConfigError(f"set_stop_requested: expected True or False, got {stop_requested!r}")
        if self._training is None or self._training.run.trainer is None:
            self._stops_early = stop_requested
        elif stop_requested:
            self._training.stop("the trial asked for it")
        elif self.get_stop_requested():
            raise ConfigError("set_stop_requested: a request to stop cannot be taken back")

    def get_stop_requested(self) -> bool:
        """Whether training is asked to end."""
        if self._training is None or self._training.run.trainer is None:
            return self._stops_early
        run = self._training.run
        return self._stops_early or run.stop_reason is not None or run.stop_request is not None

    def apply_early_stop(self) -> None:
        """Request the stop that was requested before training, if there was one; the trainer calls this in a step."""
        if self._stops_early:
            self._stops_early = False
            self.set_stop_requested(True)

    # ------------------------------------------------------------------ settings

    @property
    def hparams(self) -> Hyperparameters:
        """Hyperparameters by name; one that is missing is an error that says how to give it."""
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
        """Return the `data` of the experiment configuration."""
        return self.config_data

    def get_global_batch_size(self) -> int:
        """Return the hyperparameter `global_batch_size`: samples of all processes in one batch each."""
        size = self.hparams["global_batch_size"]
        check_count("global_batch_size", size)
        return int(size)

    def get_per_slot_batch_size(self) -> int:
        """Return the share of one process in the global batch size."""
        return self.distributed.shard_batch_size(self.get_global_batch_size())

    def get_trial_seed(self) -> int:
        """Return what everything was seeded with."""
        return self._seed

    def get_trial_id(self) -> int:
        """Return the number of this trial; 0 for a script on its own."""
        return self.info.trial_id if self.info is not None else 0

    def get_experiment_id(self) -> int:
        """Return the number of the experiment; 0 for a script on its own."""
        return (self.info.experiment_id if self.info is not None else None) or 0

    @property
    def directory(self) -> Path | None:
        """Where this trial keeps its checkpoints and metrics; None where nothing is kept."""
        if self.info is not None and self.info.directory is not None:
            return Path(self.info.directory)
        return None if self.checkpoint_root is None else self.checkpoint_root / f"trial_{self.get_trial_id()}"

    def get_tensorboard_path(self) -> Path:
        """Return the folder of this process's TensorBoard files."""
        rank = self.distributed.rank
        return (self.directory or Path()) / "tensorboard" / (f"rank_{rank}" if rank else "")

    def get_tensorboard_writer(self) -> Any:
        """Return the `SummaryWriter` of this process, in the folder of `get_tensorboard_path`."""
        if self._writer is None:
            require("tensorboard", "tensorboard")
            tensorboard = require("torch.utils.tensorboard", "tensorboard")
            self._writer = tensorboard.SummaryWriter(str(self.get_tensorboard_path()))
        return self._writer

    def get_enable_tensorboard_logging(self) -> bool:
        """Whether reported metrics are written for TensorBoard."""
        return self.logs_tensorboard

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Say whether reported metrics are written for TensorBoard."""
        self.logs_tensorboard = enable_tensorboard_logging

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with `torch.profiler.profile(*args, **kwargs)`, which goes one step on with every batch.

        Without an `on_trace_ready`, traces are written where TensorBoard finds them.
        """
        self.profiler_settings = (args, kwargs)

    # ------------------------------------------------------------------ for the trainer

    def attach(self, training: TrainingContext) -> None:
        """Route `backward` and its like to a run."""
        self._training = training

    def note_start(self) -> None:
        """Remember where the run begins."""
        self._initial_batch = self._run("get_initial_batch").progress.batches

    def close_writer(self) -> None:
        """Write out what TensorBoard was given; a later run goes on in a new file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _trainer(self, trial: PyTorchTrial) -> Trainer:
        from dovetail.pytorch.trainer import Trainer

        # With the trial's own context, and not this one: a script may forget those of its trials that it is done with.
        trainers = (trial.made_with or self)._trainers
        for known, trainer in trainers:
            if known is trial:
                return trainer
        made = Trainer(trial, self)
        trainers.append((trial, made))
        return made

    def _run(self, wanted: str) -> TrainingContext:
        if self._training is None:
            raise ConfigError(f"{wanted}: only while a trial trains")
        return self._training


TrialContext = PyTorchTrialContext
"""The name that trials annotate with, whatever their framework is."""


class Experimental:
    """Switches of a trial, as `context.experimental`."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context
        self.amp: PrecisionName | None = None
        self.moves_batches = True

    def use_amp(self, precision: PrecisionName = "auto") -> None:
        """Train in mixed precision, with loss scaling where it is needed.

        Args:
            precision: `auto`, `bf16`, `fp16` or `fp32`.
        """
        if self._context.scaler is not None:
            raise ConfigError("use_amp: the trial has wrapped a scaler of its own; use one of the two")
        self.amp = precision

    def disable_auto_to_device(self) -> None:
        """Leave batches where they are; the trial moves them with `context.to_device`."""
        self.moves_batches = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Do nothing: any loader is welcome here."""


def checkpoint_root(given: str | Path | None, info: TrialInfo | None, config: Mapping[str, Any]) -> Path | None:
    """Return the folder with the folders of trials; None means that nothing is kept."""
    if given is None:
        return None
    if given != "auto":
        return Path(given)
    if info is not None and info.directory is not None:
        return Path(info.directory).parent
    return storage_directory(config.get("checkpoint_storage") or "checkpoints")


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the settings that a configuration has under a name; none where that is missing or empty."""
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{locate(config, name)}: expected settings by name, got {found!r}")
    return found


def current_checkpoint(context: PyTorchTrialContext, given: Literal["auto"] | str | Path | None) -> str | Path | None:
    """Return what a run goes on from: what the caller said, or else what the launcher said."""
    if given is not None:
        return given
    return context.info.latest_checkpoint if context.info is not None else None
