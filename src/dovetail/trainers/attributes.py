"""Assignment of trainer options: checks, and the effects of a new value."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from dovetail.callbacks import Callback, ImprovementWindow, MaxTime, NonFiniteLoss, ProgressDisplay, StopWhen
from dovetail.clipping import Clipping
from dovetail.errors import ConfigError
from dovetail.overrides import is_ours, reject_lost_overrides
from dovetail.trainers import other_libraries
from dovetail.trainers.context import TrainingContext, Window
from dovetail.trainers.data_handling import TrainerData
from dovetail.trainers.device_copies import batch_mover
from dovetail.trainers.devices import as_device, check_device
from dovetail.trainers.frozen import FrozenBase
from dovetail.trainers.optimization import RATES, Optimization
from dovetail.trainers.options import OPTION_NAMES, TrainerOptions
from dovetail.trainers.recipe import CONFLICTS, check_conflicts, strategy_from_options
from dovetail.trainers.saving import RETENTION
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.trainers.strategies.weighting import batch_splitter
from dovetail.units import counted

if TYPE_CHECKING:
    from dovetail.trainers.single_process import SingleProcessTrainer


class OptionAssignment:
    """Implements `trainer.options.name = value` for a `SingleProcessTrainer`.

    An assignment is checked like a keyword of the constructor, and takes effect from the next run on; numbers of the
    optimizer, `gradient_clip` and `batch_size` also during a run. An option that is assigned to the trainer itself
    (`trainer.name = value`) is an error, because it would have no effect.
    """

    # True for layers, whose class bodies declare their own attributes.
    _declares_attributes: ClassVar[bool] = False

    context: TrainingContext
    options: TrainerOptions
    _given: frozenset[str]
    strategies: Strategies
    criterion: Any
    optimizer: Any

    _optimization: Optimization
    _own_callbacks: dict[str, Callback]
    _own_config: dict[str, Any]
    _move: Callable[[Any, torch.device], Any]
    _split: Callable[[Any], tuple[Any, Any]]
    _clipping: Clipping | None
    _placed: Any
    _data: TrainerData

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls._declares_attributes:
            reject_lost_overrides(cls, other_libraries.HOOKS)
            reject_option_names(cls)

    if not TYPE_CHECKING:
        # Hidden from type checkers, which would accept any name otherwise.

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property raised an AttributeError, and Python then calls `__getattr__`: raise the first error again.
                return object.__getattribute__(self, name)
            raise AttributeError(_missing_attribute_message(self, name))

        def __setattr__(self, name: str, value: Any) -> None:
            if name in OPTION_NAMES and not hasattr(type(self), name):
                raise AttributeError(option_attribute_message(self, name))
            if name == "callbacks" and not hasattr(type(self), name):
                # Otherwise the assigned callbacks would never be called.
                raise AttributeError("callbacks: write trainer.context.callbacks.add(…)")
            if name == "options" and getattr(value, "_trainer", None) is None:
                raise AttributeError("options: assign them one by one, trainer.options.name = value")
            object.__setattr__(self, name, value)

    def _set_option(self, name: str, value: Any) -> None:
        """Set an option; called by `trainer.options.name = value`.

        Args:
            name: A field of `TrainerOptions`.
            value: A value that the constructor accepts under this name.

        Raises:
            ConfigError: The value is invalid, a strategy already defines this, or the trainer is running.
            UnknownNameError: There is no such option.
        """
        context = self.context
        if context.run.trainer is not None and name not in _LIVE_OPTIONS:
            raise ConfigError(f"{name}: the trainer is running; assign this option before or after a run")
        # All options are checked together before anything changes, so a rejected value has no effect.
        options = TrainerOptions.from_keywords({**_values(self.options), name: value}, ())
        # These numbers are written into the existing optimizers, also into those that a strategy has built.
        if name in RATES:
            self._optimization.set_rate(cast("SingleProcessTrainer", self), name, value)
        else:
            check_conflicts(self.strategies, {name})
            self._check_assignment(name, options)
        # Not `setattr`, which would call this method again.
        vars(self.options)[name] = value
        self._given |= {name}
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
        # A step strategy has set the size of the window to another value than the option's.
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
        """Update everything that was built from the previous value of an option."""
        context, options = self.context, self.options
        self._rebuild_pieces(name)
        if name in _CONFIG_KEYS:
            context.config[_CONFIG_KEYS[name]] = self._own_config[_CONFIG_KEYS[name]] = value
        if name in _LOADER_OPTIONS:
            self._data.forget_loaders()
        if name in _SAVER_OPTIONS:
            saves = options.save_best or options.save_every != 0
            context.run.saver = (
                context.run.saver.with_options(options) if context.run.saver is not None and saves else None
            )
            # The next run attaches the history to the file of the new settings.
            context.history.detach()
        if name in CALLBACK_OPTIONS or name == "log_bar":
            self._renew_callbacks("verbose" if name == "log_bar" else name)
        self._data.limits = options.batch_limits
        if name in _DATA_STAGES:
            context.run.data[_DATA_STAGES[name]] = value
        elif name == "seed":
            context.state["order_seed"] = torch.initial_seed() % 2**63 if value is None else value
        elif name == "loss_function":
            self.criterion, context.run.loss_is_default = None, False
        elif name == "optim_function":
            context.optimizers.clear()
            context.schedulers.clear()
        elif name in ("lr_scheduler", "warmup", "mtm_scheduler", "scheduler_step_on_batch"):
            context.schedulers.clear()
            # The optimizers stay, with their state.
            self._optimization.has_schedulers = False
        elif name == "accumulation_steps":
            context.run.window = Window(value)
        elif name == "device_id":
            context.device = as_device(None, value)
        elif name == "save_only_trainable":
            context.run.base = frozen_base(options)
        elif name == "memory_format":
            self._move, self._placed = batch_mover(value, context.device), None
        elif name in ("target", "sample_weight", "class_weight"):
            self._split = batch_splitter(options, context)
            self.criterion = None if name != "target" else self.criterion

    def _rebuild_pieces(self, name: str) -> None:
        """Rebuild the strategy and the clipping that an option describes."""
        for role, names in CONFLICTS.items():
            if name in names and role not in self.strategies.given:
                setattr(self.strategies, role, strategy_from_options(role, self.options))
        if name == "gradient_clip":
            self._clipping = clipping_of(self.options)

    def _renew_callbacks(self, *names: str) -> None:
        """Replace the callbacks that options add, and keep the order of all such callbacks."""
        callbacks = self.context.callbacks
        # A callback that the user removed stays removed.
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
        if name == "max_time":
            return MaxTime(options.max_time) if options.max_time is not None else None
        if name == "early_stop":
            window = options.early_stop
            return None if window is None else ImprovementWindow(int(window["num_epochs"]), float(window["improv"]))
        return ProgressDisplay() if options.verbose and options.log_bar else None


class _BackgroundErrors(Callback):
    """Raises the error of a failed background checkpoint at the next step, if one process writes it."""

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        saver = context.run.saver
        # Threads of several processes do not end at the same step. There, the next checkpoint raises the error in all.
        if saver is not None and saver.writer is not None and context.process.peers is None:
            saver.writer.check()


def option_attribute_message(trainer: Any, name: str) -> str:
    """Return the error message for an option that is used as an attribute of a trainer."""
    if "options" in vars(trainer) or "trainer" in vars(trainer):
        return f"{name}: this is an option, not an attribute of the trainer; write trainer.options.{name}"
    return f"{name}: this is an option, not an attribute of the trainer; pass it as a keyword to super().__init__()"


def reject_option_names(kind: type[Any]) -> None:
    """Raise if a class outside of this library sets an option in its body, which would have no effect.

    Raises:
        ConfigError: The message names the class, the option and the alternative.
    """
    for cls in kind.__mro__:
        for name in OPTION_NAMES & vars(cls).keys():
            if not is_ours(cls):
                raise ConfigError(
                    f"{cls.__name__}.{name}: this is an option; pass it as a keyword to the constructor of the trainer"
                )


def _missing_attribute_message(trainer: Any, name: str) -> str:
    if name in OPTION_NAMES:
        return option_attribute_message(trainer, name)
    found = f"{type(trainer).__name__!r} object has no attribute {name!r}"
    return f"{found}: {other_libraries.ATTRIBUTES[name]}" if name in other_libraries.ATTRIBUTES else found


def warn_of_near_names(names: Iterable[str]) -> None:
    """Warn of attributes that were probably meant to be options, such as `checkpont_dir`."""
    for name in names:
        option = _nearest_option(name)
        if option is not None:
            warnings.warn(
                f"the trainer's attribute {name!r} is not an option and has no effect: did you mean {option!r}?",
                UserWarning,
                stacklevel=2,
            )


@cache
def _nearest_option(name: str) -> str | None:
    found = [] if name in OPTION_NAMES else get_close_matches(name, sorted(OPTION_NAMES), n=1, cutoff=0.93)
    return found[0] if found else None


def _values(options: TrainerOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in OPTION_NAMES}


def clipping_of(options: TrainerOptions) -> Clipping | None:
    """Return the clipping of the option `gradient_clip`, or None."""
    return Clipping("gradient_clip", options.gradient_clip) if options.gradient_clip else None


def frozen_base(options: TrainerOptions) -> FrozenBase | None:
    """Return the base that checkpoints leave out with the option `save_only_trainable`, or None."""
    return FrozenBase() if options.save_only_trainable else None


# Options that have another name in configurations.
_CONFIG_KEYS = {"num_epochs": "epochs", "batch_size": "batch_size", "learning_rate": "lr"}

# Options with the data of a stage.
_DATA_STAGES = {"train_dataset": "train", "val_dataset": "valid", "test_dataset": "test"}

# Options that add a callback, in the order in which the callbacks are called.
CALLBACK_OPTIONS = ("save_in_background", "nonfinite", "stop_when_acc", "early_stop", "max_time", "verbose")

# Options that take effect during a run. All others are part of the plan, which is made before the run.
_LIVE_OPTIONS = {"learning_rate", "momentum", "weight_decay", "gradient_clip", "batch_size"}

# Options from which loaders are built.
_LOADER_OPTIONS = {
    "batch_size",
    "val_batch_size",
    "test_batch_size",
    "shuffle",
    "num_workers",
    "drop_last",
    "seed",
    "collate_fn",
    "target",
    "sample_weight",
    "class_weight",
    "overfit_batches",
}

# Options that determine the order of the samples in an epoch.
_ORDER_OPTIONS = {"batch_size", "shuffle", "drop_last", "seed", "overfit_batches"}

# Options from which the saver is built.
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
