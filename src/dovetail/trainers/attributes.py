"""Options of a trainer as attributes that can be read and assigned."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dovetail.callbacks import Callback, ImprovementWindow, NonFiniteLoss, ProgressDisplay, StopWhen
from dovetail.clipping import Clipping
from dovetail.data import to_device
from dovetail.data.batches import map_tensors
from dovetail.errors import ConfigError
from dovetail.trainers.context import TrainingContext, Window
from dovetail.trainers.devices import as_device, check_device
from dovetail.trainers.options import TrainerOptions
from dovetail.trainers.recipe import CONFLICTS, check_conflicts, strategy_from_options
from dovetail.trainers.saving import RETENTION
from dovetail.trainers.schedules.applied import set_lr, set_momentum
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.units import counted

__all__ = [
    "CALLBACK_OPTIONS",
    "Option",
    "OptionAttributes",
    "batch_mover",
    "channels_last",
    "clipping_of",
    "warn_of_near_names",
]


class Option:
    """An option of a trainer as an attribute.

    Reading returns the value in `trainer.options`. Assigning calls `trainer.set_option`, which checks the value like
    the constructor does.
    """

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type[Any] | None = None) -> Any:
        return self if trainer is None else getattr(trainer.options, self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        if "options" not in vars(trainer):
            raise ConfigError(f"{self.name}: this is an option; pass it as a keyword to super().__init__()")
        trainer.set_option(self.name, value)


class OptionAttributes:
    """The options of `SingleProcessTrainer` as attributes, and what follows from assigning them.

    An assignment is checked like a keyword of the constructor, and takes effect from the next run on; numbers of the
    optimizer, `gradient_clip` and `batch_size` also during a run.
    """

    context: TrainingContext
    options: TrainerOptions
    given: frozenset[str]
    strategies: Strategies
    criterion: Any
    optimizer: Any

    # Numbers of optimizers that were assigned: optimizers that are built later have them, too.
    _assigned: set[str]
    _rates_are_checked: bool = False
    _own_callbacks: dict[str, Callback]
    _own_config: dict[str, Any]
    _has_schedulers: bool
    _move: Callable[[Any, torch.device], Any]
    _clipping: Clipping | None
    _placed: Any

    if TYPE_CHECKING:

        def forget_loaders(self) -> None: ...  # noqa: D102 - the trainer's
        def _build_optimizers(self) -> None: ...

    scheduler_step_on_batch: Any = Option()
    mtm_scheduler: Any = Option()
    gradient_clip: Any = Option()
    accumulation_steps: Any = Option()
    seed: Any = Option()
    shuffle: Any = Option()
    num_workers: Any = Option()
    drop_last: Any = Option()
    device_map: Any = Option()
    memory_format: Any = Option()
    verbose: Any = Option()
    log_bar: Any = Option()
    print_every: Any = Option()
    nonfinite: Any = Option()
    stop_when_acc: Any = Option()
    early_stop: Any = Option()
    checkpoint_dir: Any = Option()
    checkpoint_name: Any = Option()
    save_every: Any = Option()
    save_best: Any = Option()
    save_hist: Any = Option()
    keep_last: Any = Option()
    keep_best: Any = Option()
    keep_every: Any = Option()
    best_metric: Any = Option()
    best_mode: Any = Option()
    save_in_background: Any = Option()
    on_save_error: Any = Option()
    max_concurrency: Any = Option()

    def set_option(self, name: str, value: Any) -> None:
        """Set an option, as assigning the attribute of this name does; it takes effect from the next run on.

        Args:
            name: A field of `TrainerOptions`.
            value: A value that the constructor accepts under this name.

        Raises:
            ConfigError: The value is not accepted, a strategy decides this, or the trainer runs.
            UnknownNameError: There is no such option.
        """
        context = self.context
        if context.run.trainer is not None and name not in _LIVE_OPTIONS:
            raise ConfigError(f"{name}: the trainer is running; assign this option before or after a run")
        options = TrainerOptions.from_keywords({**_values(self.options), name: value}, ())
        if name in _RATES:
            self._set_rate(name, value)
        else:
            check_conflicts(self.strategies, {name})
            self._check_assignment(name, options)
        self.options, self.given = options, self.given | {name}
        self._apply_option(name, value)

    def _check_assignment(self, name: str, options: TrainerOptions) -> None:
        """Raise if an assigned option cannot take effect."""
        context = self.context
        done = context.progress.batch
        if name in _ORDER_OPTIONS and done and context.run.trainer is None:
            raise ConfigError(
                f"{name}: the trainer has read {counted(done, 'batch', 'batches')} of an epoch, whose rest would have "
                "another order; assign this option at the end of an epoch"
            )
        if name == "accumulation_steps" and context.run.window.size != self.options.accumulation_steps:
            raise ConfigError(f"{name}: {self.strategies.training_step!r} decides this; give one or the other")
        if name == "device_id":
            device = as_device(None, options.device_id)
            check_device(device)
            if context.optimizers and device != context.device:
                raise ConfigError(
                    f"{name}: the optimizer's state is on {str(context.device)!r} already; assign it before the first "
                    "run"
                )

    def _apply_option(self, name: str, value: Any) -> None:
        """Bring everything that was made from an option before up to date."""
        context, options = self.context, self.options
        self._rebuild_pieces(name)
        if name in _CONFIG_KEYS:
            context.config[_CONFIG_KEYS[name]] = self._own_config[_CONFIG_KEYS[name]] = value
        if name in _LOADER_OPTIONS:
            self.forget_loaders()
        if name in _SAVER_OPTIONS:
            saves = options.save_best or options.save_every != 0
            context.run.saver = context.run.saver.renewed(options) if context.run.saver is not None and saves else None
            context.history.detach()
        if name in CALLBACK_OPTIONS or name == "log_bar":
            self._renew_callbacks("verbose" if name == "log_bar" else name)
        if name in _DATA_STAGES:
            context.run.data[_DATA_STAGES[name]] = value
        elif name == "seed":
            context.state["order_seed"] = torch.initial_seed() % 2**63 if value is None else value
        elif name == "loss_function":
            self.criterion, context.run.loss_is_default = None, False
        elif name == "optim_function":
            context.optimizers.clear()
            context.schedulers.clear()
        elif name in ("lr_scheduler", "mtm_scheduler", "scheduler_step_on_batch"):
            context.schedulers.clear()
            self._has_schedulers = False
        elif name == "accumulation_steps":
            context.run.window = Window(value)
        elif name == "device_id":
            context.device = as_device(None, value)
        elif name == "memory_format":
            self._move, self._placed = batch_mover(value), None

    def _rebuild_pieces(self, name: str) -> None:
        """Build the strategy and the clipping that an option describes again."""
        for role, names in CONFLICTS.items():
            if name in names and role not in self.strategies.given:
                setattr(self.strategies, role, strategy_from_options(role, self.options))
        if name == "gradient_clip":
            self._clipping = clipping_of(self.options)

    def _set_rate(self, name: str, value: Any) -> None:
        """Set a number of the optimizer in every parameter group, now and whenever optimizers are built."""
        if self.context.model is not None:
            self._build_optimizers()
            self._write_rate(name, value)
        self._assigned.add(name)

    def _check_rates(self) -> None:
        """Raise if an optimizer has its own value for a number that was given to the constructor."""
        if self._rates_are_checked:
            return
        for name, key in (("learning_rate", "lr"), ("momentum", "momentum"), ("weight_decay", "weight_decay")):
            if name not in self.given - self._assigned:
                continue
            wanted = self.context.config["lr"] if name == "learning_rate" else getattr(self.options, name)
            groups = [group for optimizer in self.context.optimizers for group in optimizer.param_groups]
            found = [float(group[key]) for group in groups if key in group]
            if found and not any(math.isclose(wanted, value, rel_tol=1e-6) for value in found):
                raise ConfigError(
                    f"{name}: the optimizer has its own, {found[0]:g}, so {wanted:g} would have no effect; give one or "
                    "the other"
                )
        # Once: schedules change the rates of an optimizer object, which a later run uses again.
        self._rates_are_checked = True

    def _apply_rates(self) -> None:
        """Give newly built optimizers the numbers that were assigned; a run's configuration may have another rate."""
        for name in self._assigned:
            own = self.context.config["lr"] if name == "learning_rate" else getattr(self.options, name)
            self._write_rate(name, own)

    def _write_rate(self, name: str, value: float) -> None:
        for optimizer in self.context.optimizers:
            for group in optimizer.param_groups:
                _RATES[name](group, value)

    def _first_group(self) -> dict[str, Any]:
        """Return the first parameter group, or nothing without a model."""
        return {} if self.optimizer is None else self.optimizer.param_groups[0]

    @property
    def num_epochs(self) -> int:
        """The epoch at which a `fit` without `max_length` ends."""
        return int(self.context.config["epochs"])

    @num_epochs.setter
    def num_epochs(self, number: int) -> None:
        self.set_option("num_epochs", number)

    @property
    def batch_size(self) -> int:
        """Samples in a training batch; a new value takes effect with the next epoch."""
        return int(self.context.config["batch_size"])

    @batch_size.setter
    def batch_size(self, number: int) -> None:
        self.set_option("batch_size", number)

    @property
    def val_batch_size(self) -> int:
        """Samples in a validation batch."""
        return self.options.val_batch_size or self.batch_size

    @val_batch_size.setter
    def val_batch_size(self, number: int) -> None:
        self.set_option("val_batch_size", number)

    @property
    def test_batch_size(self) -> int:
        """Samples in a test batch."""
        return self.options.test_batch_size or self.val_batch_size

    @test_batch_size.setter
    def test_batch_size(self, number: int) -> None:
        self.set_option("test_batch_size", number)

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group, or the option without a model; assigning it sets every group."""
        group = self._first_group()
        return float(group["lr"]) if "lr" in group else self.options.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.set_option("learning_rate", rate)

    @property
    def momentum(self) -> float:
        """The momentum of the optimizer, or the option if the optimizer takes none; assigning it sets every group.

        `betas[0]` of Adam and its kin is the momentum as soon as a schedule or an assignment has set it.
        """
        group = self._first_group()
        if "betas" in group and (self.options.mtm_scheduler is not None or "momentum" in self._assigned):
            return float(group["betas"][0])
        return float(group.get("momentum", self.options.momentum))

    @momentum.setter
    def momentum(self, value: float) -> None:
        self.set_option("momentum", value)

    @property
    def weight_decay(self) -> float:
        """The weight decay of the first parameter group, or the option; assigning it sets every group."""
        return float(self._first_group().get("weight_decay", self.options.weight_decay))

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        self.set_option("weight_decay", value)

    @property
    def loss_function(self) -> Any:
        """The loss as it was given, or its strategy."""
        return self.strategies.loss if "loss" in self.strategies.given else self.options.loss_function

    @loss_function.setter
    def loss_function(self, loss: Any) -> None:
        self.set_option("loss_function", loss)

    @property
    def optim_function(self) -> Any:
        """The optimizer as it was given, or its strategy; assigning another one drops the present optimizer."""
        return self.strategies.optimizer if "optimizer" in self.strategies.given else self.options.optim_function

    @optim_function.setter
    def optim_function(self, optimizer: Any) -> None:
        self.set_option("optim_function", optimizer)

    @property
    def lr_scheduler(self) -> Any:
        """The schedule as it was given, or its strategy; an assigned one starts at its beginning."""
        return self.strategies.lr_scheduler if "lr_scheduler" in self.strategies.given else self.options.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.set_option("lr_scheduler", scheduler)

    @property
    def train_dataset(self) -> Any:
        """The training data."""
        return self.context.run.data.get("train")

    @train_dataset.setter
    def train_dataset(self, data: Any) -> None:
        self.set_option("train_dataset", data)

    @property
    def val_dataset(self) -> Any:
        """The validation data."""
        return self.context.run.data.get("valid")

    @val_dataset.setter
    def val_dataset(self, data: Any) -> None:
        self.set_option("val_dataset", data)

    @property
    def test_dataset(self) -> Any:
        """The test data."""
        return self.context.run.data.get("test")

    @test_dataset.setter
    def test_dataset(self, data: Any) -> None:
        self.set_option("test_dataset", data)

    @property
    def device_id(self) -> int:
        """-1 for the CPU, else the number of the device."""
        device = self.context.device
        return -1 if device.type == "cpu" else device.index or 0

    @device_id.setter
    def device_id(self, number: int) -> None:
        self.set_option("device_id", number)

    def _renew_callbacks(self, *names: str) -> None:
        """Replace the callbacks that options add, and keep the order of all such callbacks."""
        callbacks = self.context.callbacks
        # One that the user has removed stays removed.
        present = {name: it for name, it in self._own_callbacks.items() if any(it is each for each in callbacks)}
        callbacks.remove(*present.values())
        wanted = {**present, **{name: self._callback_of(name) for name in names}}
        self._own_callbacks = {name: it for name in CALLBACK_OPTIONS if (it := wanted.get(name)) is not None}
        callbacks.add(*self._own_callbacks.values())

    def _callback_of(self, name: str) -> Callback | None:
        """Return the callback that an option adds, or None if its value needs none."""
        options = self.options
        if name == "save_in_background":
            return _BackgroundErrors() if options.save_in_background else None
        if name == "nonfinite":
            return NonFiniteLoss(options.nonfinite) if options.nonfinite != "ignore" else None
        if name == "stop_when_acc":
            return StopWhen("valid_accuracy", options.stop_when_acc, mode="max") if options.stop_when_acc > 0 else None
        if name == "early_stop":
            window = options.early_stop
            return None if window is None else ImprovementWindow(int(window["num_epochs"]), float(window["improv"]))
        return ProgressDisplay() if options.verbose and options.log_bar else None


class _BackgroundErrors(Callback):
    """Raises the error of a checkpoint that could not be written, at the next step."""

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        if context.run.saver is not None and context.run.saver.writer is not None:
            context.run.saver.writer.check()


def warn_of_near_names(names: Iterable[str]) -> None:
    """Warn of attributes that were probably meant to be options, such as `checkpont_dir`."""
    for name in names:
        option = _nearest_option(name)
        if option is not None:
            warnings.warn(
                f"the trainer's attribute {name!r} is no option and has no effect: did you mean {option!r}?",
                UserWarning,
                stacklevel=2,
            )


@cache
def _nearest_option(name: str) -> str | None:
    options = [field.name for field in fields(TrainerOptions)]
    found = [] if name in options else get_close_matches(name, options, n=1, cutoff=0.93)
    return found[0] if found else None


def _values(options: TrainerOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options)}


def _set_weight_decay(group: dict[str, Any], value: float) -> None:
    if "weight_decay" not in group:
        raise ConfigError("weight_decay: expected an optimizer with 'weight_decay', got one that has none")
    group["weight_decay"] = value


def batch_mover(memory_format: str | None) -> Callable[[Any, torch.device], Any]:
    """Return the function that moves a batch to a device, in a memory format."""
    return to_device if memory_format is None else _to_device_channels_last


def _to_device_channels_last(batch: Any, device: torch.device) -> Any:
    return map_tensors(channels_last, to_device(batch, device))


def clipping_of(options: TrainerOptions) -> Clipping | None:
    """Return the limit for gradients that the option `gradient_clip` sets, or None."""
    return Clipping("gradient_clip", options.gradient_clip) if options.gradient_clip else None


def channels_last(tensor: Tensor) -> Tensor:
    """Return images with their channels last in memory, and any other tensor as it is."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


# The options that configurations have under another name.
_CONFIG_KEYS = {"num_epochs": "epochs", "batch_size": "batch_size", "learning_rate": "lr"}

_DATA_STAGES = {"train_dataset": "train", "val_dataset": "valid", "test_dataset": "test"}

# Numbers of an optimizer, and how they are written into a parameter group.
_RATES: dict[str, Callable[[dict[str, Any], float], None]] = {
    "learning_rate": set_lr,
    "momentum": set_momentum,
    "weight_decay": _set_weight_decay,
}

# Options that add a callback, in the order in which the callbacks are called.
CALLBACK_OPTIONS = ("save_in_background", "nonfinite", "stop_when_acc", "early_stop", "verbose")

# Options that take effect while the trainer runs. All others are part of a plan that is made before.
_LIVE_OPTIONS = {"learning_rate", "momentum", "weight_decay", "gradient_clip", "batch_size"}

_LOADER_OPTIONS = {"batch_size", "val_batch_size", "test_batch_size", "shuffle", "num_workers", "drop_last", "seed"}

# Options that the order of the samples in an epoch depends on.
_ORDER_OPTIONS = {"batch_size", "shuffle", "drop_last", "seed"}

_SAVER_OPTIONS = {
    "checkpoint_dir",
    "checkpoint_name",
    "save_every",
    "save_best",
    "save_hist",
    "best_metric",
    "best_mode",
    "save_in_background",
    "on_save_error",
    *RETENTION,
}
