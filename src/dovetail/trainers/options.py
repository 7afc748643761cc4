"""Trainer options with their defaults and checks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers import other_libraries
from dovetail.units import TrainUnit, as_seconds


@dataclass(kw_only=True)
class TrainerOptions:
    """Options of `Trainer`: its keywords besides objects such as model, device, callbacks, metrics and strategies.

    The options of a trainer (`trainer.options`) can be assigned: `trainer.options.batch_size = 32` is checked like the
    keyword of the constructor and takes effect from the next run on. `learning_rate`, `momentum`, `weight_decay`,
    `gradient_clip` and `batch_size` also take effect during a run. Options without a trainer are immutable.

    Example:
        >>> import torch
        >>> from dovetail import Trainer
        >>> trainer = Trainer(torch.nn.Linear(4, 2), "cpu", batch_size=16)
        >>> trainer.options.batch_size = 32
        >>> trainer.options.batch_size, trainer.options.num_epochs
        (32, 10)

    Attributes:
        num_epochs: Total epochs of `train()`, and of a `fit` without `max_length`.
        learning_rate: Passed to an optimizer that is built by name.
        momentum: Passed to an optimizer that is built by name, if it has one (SGD and RMSprop do, Adam does not).
        weight_decay: Passed to an optimizer that is built by name.
        loss_function: A name in `torch.nn`, a loss class, or any callable of outputs and targets.
        optim_function: A name in `torch.optim`, an optimizer class, or a callable of the parameters.
        lr_scheduler: A schedule of `dovetail.trainers.schedules`, a callable of the optimizer such as
            `partial(StepLR, step_size=3)`, a name in `torch.optim.lr_scheduler` that needs no argument, or a scheduler.
            All but the last build one scheduler for each optimizer. `cosine`, `linear`, `wsd`, `inverse_sqrt` and
            `constant` are schedules over the length of the run (`RunSchedule`).
        warmup: The warm-up of such a schedule: a part of the run (0.05), a number of updates (100), or `Epochs(1)`.
            Without `lr_scheduler`, the rate is constant after it.
        mtm_scheduler: The same for momentum (`momentum` or `betas[0]`).
        scheduler_step_on_batch: Step a plain torch scheduler by batches instead of epochs: at every update, once for
            each batch since the last update.
        gradient_clip: Largest norm of the gradients; 0 means no clipping.
        accumulation_steps: Batches per update.
        seed: Seeds python, numpy, torch and the order of the data. None leaves the first three unchanged and
            takes torch's initial seed for the order.
        target: The column of a data frame, or the key of dictionaries, that holds the targets; for a frame also a list
            of columns. None means the first of `labels`, `label`, `target`, `targets` and `y`.
        sample_weight: Weight of each sample in the loss: the column of a data frame or the key of dictionaries that
            holds it, or True if it is the last item of batches `(inputs, targets, weights)`. False means none.
        class_weight: Weight of each class in cross entropy: numbers by class (1 for the other classes), a list or
            tensor with all of them, or `"balanced"` for the inverse frequencies in the training data.
        batch_size: Samples per training batch, for data that is not yet in batches.
        val_batch_size: The same for validation; 0 means `batch_size`.
        test_batch_size: The same for test and prediction; 0 means `val_batch_size`.
        train_dataset: Training data, as `fit` takes it.
        val_dataset: Validation data.
        test_dataset: Test data; `evaluate()` uses it.
        shuffle: True to shuffle the training data, in a new order in every epoch.
        num_workers: Worker processes that read data which is not in memory. Tensors, arrays, frames, lists of samples,
            and subsets of them are in memory, unless `collate_fn` is given.
        collate_fn: Builds a batch from a list of samples, in every stage, for data that is not yet in batches; None
            means torch's `default_collate`.
        drop_last: True to skip a last, shorter training batch, unless it is the only one. Validation always
            reads every sample.
        limit_train_batches: The batches of a training epoch: a whole number, or a part such as 0.1. 1.0 means all.
        limit_val_batches: The same for validation.
        overfit_batches: The number or part of training batches that every epoch trains, unshuffled, and that validation
            reads as well; 0 means off. A model that cannot learn them has a bug.
        device_id: -1 for the CPU, else the number of an accelerator. Without this and `device`, the best device that
            is available.
        device_map: The device to which checkpoints are loaded; None means the trainer's own device.
        memory_format: `channels_last` stores images, and the parameters of convolutions, pixel by pixel; many devices
            then compute convolutions faster. None changes nothing.
        verbose: Whether to show progress.
        log_bar: Another name for `verbose`; progress is shown if both are true.
        print_every: Batches between two reports of the running loss.
        nonfinite: The reaction to a NaN or infinite loss: `raise`, `stop`, `warn`, or `ignore`.
        stop_when_acc: Validation accuracy at which training ends; 0 means never.
        early_stop: `{"num_epochs": n, "improv": d}` ends training if accuracy gained less than d over n epochs.
        max_time: The time after which training ends: seconds, a `timedelta`, or a text such as `"00:12:00:00"` (days,
            hours, minutes, seconds). The time before a resume counts. None means no limit.
        checkpoint_dir: The folder of checkpoints and history.
        checkpoint_name: The prefix of their names.
        save_every: Batches between two checkpoints; -1 means one per epoch, 0 none.
        save_best: True to keep a separate checkpoint of the best validation so far.
        save_hist: True to write the history beside the checkpoints.
        keep_last: The number of newest periodic checkpoints to keep.
        keep_best: The number of best checkpoints to keep, by `best_metric`.
        keep_every: Keep the checkpoints whose batch number is a multiple of this. Without any of the three, all are
            kept.
        best_metric: The metric of "best", such as `valid_loss`; None means the accuracy if there is one, else the loss.
        best_mode: Whether small (`min`) or large (`max`) values of it are better; None derives this from its name.
        save_in_background: True to write checkpoints in a thread while training continues.
        save_only_trainable: True to leave out of checkpoints what does not train: frozen parameters, and buffers that
            do not change. Such a checkpoint fits only a model with the same frozen weights, which is checked.
        on_save_error: `raise` ends training if a checkpoint cannot be written; `warn` only warns.
        max_concurrency: Run `train` in a separate process, at most this many at once; None means in this process.
    """

    # Length, optimizer and loss.
    num_epochs: int = 10
    learning_rate: float = 1e-4
    momentum: float = 0.5
    weight_decay: float = 1e-5
    loss_function: Any = "CrossEntropyLoss"
    optim_function: Any = "Adam"
    lr_scheduler: Any = None
    warmup: float | TrainUnit = 0
    mtm_scheduler: Any = None
    scheduler_step_on_batch: bool = False
    gradient_clip: float = 0.0
    accumulation_steps: int = 1
    # Seed and data.
    seed: int | None = None
    target: str | Sequence[str] | None = None
    sample_weight: str | bool = False
    class_weight: Any = None
    batch_size: int = 64
    val_batch_size: int = 0
    test_batch_size: int = 0
    train_dataset: Any = None
    val_dataset: Any = None
    test_dataset: Any = None
    shuffle: bool = True
    num_workers: int = 1
    collate_fn: Callable[[list[Any]], Any] | None = None
    drop_last: bool = True
    limit_train_batches: float = 1.0
    limit_val_batches: float = 1.0
    overfit_batches: float = 0
    # Device.
    device_id: int = -1
    device_map: Any = None
    memory_format: Literal["channels_last"] | None = None
    # Display, and reasons to end early.
    verbose: bool = True
    log_bar: bool = True
    print_every: int = 10
    nonfinite: Literal["raise", "stop", "warn", "ignore"] = "raise"
    stop_when_acc: float = 0.0
    early_stop: Mapping[str, float] | None = None
    max_time: float | str | timedelta | Mapping[str, float] | None = None
    # Checkpoints.
    checkpoint_dir: str | Path = "checkpoint"
    checkpoint_name: str = "ck"
    save_every: int = -1
    save_best: bool = False
    save_hist: bool = True
    keep_last: int | None = None
    keep_best: int | None = None
    keep_every: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] | None = None
    save_in_background: bool = False
    save_only_trainable: bool = False
    on_save_error: Literal["raise", "warn"] = "raise"
    # Processes.
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            self._check_number(name, "a whole number", (int,), least)
        for name in _NUMBERS:
            self._check_number(name, "a number", (int, float), 0.0)
        for name in _COUNTS:
            if getattr(self, name) is not None:
                self._check_number(name, "None or a whole number", (int,), 1)
        self._check_limits()
        for name, accepted in _ACCEPTED.items():
            value = getattr(self, name)
            if value not in accepted:
                *others, last = map(repr, accepted)
                raise ConfigError(f"{name}: expected {', '.join(others)} or {last}, got {value!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, SupportsIndex)):
            raise ConfigError(f"seed: expected a whole number or None, got {self.seed!r}")
        if not isinstance(self.checkpoint_dir, (str, PathLike)):
            raise ConfigError(
                f"checkpoint_dir: expected the path of a folder, got {self.checkpoint_dir!r}; leave it out for a run "
                "without checkpoints"
            )
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise ConfigError(f"collate_fn: expected a function of a list of samples, got {self.collate_fn!r}")
        window = self.early_stop
        if window is not None and (not isinstance(window, Mapping) or set(window) != {"num_epochs", "improv"}):
            shown = sorted(window) if isinstance(window, Mapping) else repr(window)
            raise ConfigError(f"early_stop: expected the keys 'num_epochs' and 'improv', got {shown}")
        if window is not None and not all(isinstance(it, (int, float)) for it in window.values()):
            raise ConfigError(f"early_stop: expected numbers, got {dict(window)}")
        if self.max_time is not None:
            as_seconds(self.max_time, "max_time")
        # From here on, `__setattr__` passes an assignment to the trainer.
        vars(self)["_trainer"] = None

    def _check_limits(self) -> None:
        for name in ("limit_train_batches", "limit_val_batches", "overfit_batches"):
            value = getattr(self, name)
            is_off = name == "overfit_batches" and value == 0 and not isinstance(value, bool)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not is_off and not is_count and not (isinstance(value, float) and 0 < value <= 1):
                raise ConfigError(
                    f"{name}: expected a whole number of batches, or a part of them such as 0.1, got {value!r}"
                )

    @property
    def datasets(self) -> dict[str, Any]:
        """The data of the options by stage; None for a stage without data."""
        return {"train": self.train_dataset, "valid": self.val_dataset, "test": self.test_dataset}

    @property
    def batch_limits(self) -> dict[str, float]:
        """The batches of a pass by stage, as a whole number or as a part; without the stages that have no limit."""
        limits = {"train": self.limit_train_batches, "valid": self.limit_val_batches}
        if self.overfit_batches:
            limits = dict.fromkeys(limits, self.overfit_batches)
        # 1.0 is the whole pass, and 1 is a single batch.
        return {stage: limit for stage, limit in limits.items() if isinstance(limit, int) or limit < 1}

    def _check_number(self, name: str, what: str, kinds: tuple[type, ...], least: float) -> None:
        value: Any = getattr(self, name)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        # Not `value < least`: every comparison with NaN is false, so it would accept NaN.
        if not is_number or not value >= least:
            raise ConfigError(f"{name}: expected {what} that is at least {least}, got {value!r}")

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # The constructor of the dataclass assigns the fields.
            if "_trainer" not in vars(self):
                object.__setattr__(self, name, value)
                return
            trainer = None if self._trainer is None else self._trainer()
            if trainer is None:
                raise FrozenInstanceError(f"{name}: these options belong to no trainer; use dataclasses.replace")
            trainer._set_option(name, value)

    def bound_to(self, trainer: Any) -> TrainerOptions:
        """Return a copy that belongs to a trainer; assignments to it call the trainer's `_set_option`."""
        bound = copy.copy(self)
        # A weak reference, because the trainer holds its options.
        vars(bound)["_trainer"] = weakref.ref(trainer)
        return bound

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no trainer until `bound_to`.
        return {**vars(self), "_trainer": None}

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any], also_known: Collection[str]) -> TrainerOptions:
        """Return the options of a constructor call; the error for an unknown keyword suggests the nearest name."""
        for name in given:
            if name not in OPTION_NAMES:
                raise UnknownNameError("keyword", name, OPTION_NAMES.union(also_known), other_libraries.OPTIONS)
        return cls(**given)


def as_mode(mode: str) -> Literal["train", "test"]:
    """Return the mode of a trainer, checked."""
    if mode in ("train", "test"):
        return cast(Literal["train", "test"], mode)
    raise ConfigError(f"mode: expected 'train' or 'test', got {mode!r}")


OPTION_NAMES = frozenset(field.name for field in fields(TrainerOptions))

# The smallest accepted values. -1 means "once per epoch" for `save_every`, and the CPU for `device_id`.
_WHOLE = {
    "num_epochs": 0,
    "accumulation_steps": 1,
    "batch_size": 1,
    "val_batch_size": 0,
    "test_batch_size": 0,
    "num_workers": 0,
    "print_every": 1,
    "save_every": -1,
    "device_id": -1,
}
_NUMBERS = ("learning_rate", "momentum", "weight_decay", "gradient_clip", "stop_when_acc")
_COUNTS = ("keep_last", "keep_best", "keep_every", "max_concurrency")
# The only accepted values of these options.
_ACCEPTED: dict[str, tuple[str | None, ...]] = {
    "nonfinite": ("raise", "stop", "warn", "ignore"),
    "memory_format": ("channels_last", None),
    "best_mode": ("min", "max", None),
    "on_save_error": ("raise", "warn"),
}
