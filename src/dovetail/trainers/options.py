"""Options of a trainer, with their defaults and checks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers import other_libraries


@dataclass(kw_only=True)
class TrainerOptions:
    """Keywords of `Trainer` beyond the pieces it is made of.

    The options of a trainer (`trainer.options`) can be assigned: `trainer.options.batch_size = 32` is checked like the
    keyword of the constructor and takes effect from the next run on. `learning_rate`, `momentum`, `weight_decay`,
    `gradient_clip` and `batch_size` also take effect during a run. Options that belong to no trainer are constant.

    Example:
        >>> import torch
        >>> from dovetail import Trainer
        >>> trainer = Trainer(torch.nn.Linear(4, 2), "cpu", batch_size=16)
        >>> trainer.options.batch_size = 32
        >>> trainer.options.batch_size, trainer.options.num_epochs
        (32, 10)

    Attributes:
        num_epochs: Epochs in all that `train()` and a `fit` without `max_length` run to.
        learning_rate: Given to an optimizer that is built by name.
        momentum: Given to an optimizer that is built by name, if it takes one (SGD and RMSprop do, Adam does not).
        weight_decay: Given to an optimizer that is built by name.
        loss_function: A name in `torch.nn`, a loss class, or any callable of outputs and targets.
        optim_function: A name in `torch.optim`, an optimizer class, or a callable of the parameters.
        lr_scheduler: A schedule of `dovetail.trainers.schedules`, a callable of the optimizer such as
            `partial(StepLR, step_size=3)`, a name in `torch.optim.lr_scheduler` that needs no argument, or a scheduler.
            All but the last make one scheduler for each optimizer.
        mtm_scheduler: The same for momentum (`momentum` or `betas[0]`).
        scheduler_step_on_batch: Step a plain torch scheduler by batches instead of epochs: at every update, once for
            each batch since the last.
        gradient_clip: Largest norm of the gradients; 0 clips nothing.
        accumulation_steps: Batches that share one update.
        seed: Sets python, numpy, torch and the order of the data; None leaves the first three alone and
            takes torch's initial seed for the order.
        batch_size: Samples in a training batch that the trainer forms itself.
        val_batch_size: The same for validation; 0 for `batch_size`.
        test_batch_size: The same for test and prediction; 0 for `val_batch_size`.
        train_dataset: Training data, as `fit` takes it.
        val_dataset: Validation data.
        test_dataset: Test data; `evaluate()` uses it.
        shuffle: Whether training data is shuffled, anew in every epoch.
        num_workers: Processes that read data which does not lie in memory.
        drop_last: Whether a last, shorter training batch is left out, unless it is the only one. Validation always
            sees every sample.
        device_id: -1 for the CPU, else the number of a CUDA device. Where neither this nor `device` is given, the
            best device there is.
        device_map: Where checkpoints are loaded to; None for the trainer's own device.
        memory_format: `channels_last` lays images, in batches and in the parameters of convolutions, pixel by pixel,
            which many devices convolve faster; None leaves them as they are.
        verbose: Whether to show progress.
        log_bar: The same, by its other name; progress is shown where both are true.
        print_every: Batches between two reports of the running loss.
        nonfinite: What a NaN or infinite loss does: `raise`, `stop`, `warn`, or `ignore`.
        stop_when_acc: Validation accuracy at which training ends; 0 for never.
        early_stop: `{"num_epochs": n, "improv": d}` ends training when accuracy gained less than d over n epochs.
        checkpoint_dir: The folder of checkpoints and history.
        checkpoint_name: The first part of their names.
        save_every: Batches between two checkpoints; -1 for one per epoch, 0 for none.
        save_best: Whether the best validation so far has a checkpoint of its own.
        save_hist: Whether the history is written beside the checkpoints.
        keep_last: How many of the newest periodic checkpoints stay.
        keep_best: How many of the best ones stay, by `best_metric`.
        keep_every: Those stay whose batch number is a multiple of this. Where none of the three is given, all stay.
        best_metric: What "best" means, such as `valid_loss`; None for the accuracy where there is one, else the loss.
        best_mode: Whether small (`min`) or large (`max`) values of it are good; None follows its name.
        save_in_background: Whether checkpoints are written by a thread while training goes on.
        on_save_error: Whether a checkpoint that cannot be written ends training (`raise`) or is told (`warn`).
        max_concurrency: `train` works in a process of its own, of which this many at most run at
            once; None to train in this one.
    """

    num_epochs: int = 10
    learning_rate: float = 1e-4
    momentum: float = 0.5
    weight_decay: float = 1e-5
    loss_function: Any = "CrossEntropyLoss"
    optim_function: Any = "Adam"
    lr_scheduler: Any = None
    mtm_scheduler: Any = None
    scheduler_step_on_batch: bool = False
    gradient_clip: float = 0.0
    accumulation_steps: int = 1
    seed: int | None = None
    batch_size: int = 64
    val_batch_size: int = 0
    test_batch_size: int = 0
    train_dataset: Any = None
    val_dataset: Any = None
    test_dataset: Any = None
    shuffle: bool = True
    num_workers: int = 1
    drop_last: bool = True
    device_id: int = -1
    device_map: Any = None
    memory_format: Literal["channels_last"] | None = None
    verbose: bool = True
    log_bar: bool = True
    print_every: int = 10
    nonfinite: Literal["raise", "stop", "warn", "ignore"] = "raise"
    stop_when_acc: float = 0.0
    early_stop: Mapping[str, float] | None = None
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
    on_save_error: Literal["raise", "warn"] = "raise"
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            self._check_number(name, "a whole number", (int,), least)
        for name in _NUMBERS:
            self._check_number(name, "a number", (int, float), 0.0)
        for name in _COUNTS:
            if getattr(self, name) is not None:
                self._check_number(name, "None or a whole number", (int,), 1)
        for name, accepted in _ACCEPTED.items():
            value = getattr(self, name)
            if value not in accepted:
                *others, last = map(repr, accepted)
                raise ConfigError(f"{name}: expected {', '.join(others)} or {last}, got {value!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, SupportsIndex)):
            raise ConfigError(f"seed: expected a whole number or None, got {self.seed!r}")
        window = self.early_stop
        if window is not None and (not isinstance(window, Mapping) or set(window) != {"num_epochs", "improv"}):
            shown = sorted(window) if isinstance(window, Mapping) else repr(window)
            raise ConfigError(f"early_stop: expected the keys 'num_epochs' and 'improv', got {shown}")
        if window is not None and not all(isinstance(it, (int, float)) for it in window.values()):
            raise ConfigError(f"early_stop: expected numbers, got {dict(window)}")
        # From here on, an assignment goes to the trainer.
        vars(self)["_trainer"] = None

    def _check_number(self, name: str, what: str, kinds: tuple[type, ...], least: float) -> None:
        value: Any = getattr(self, name)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        # Not `value < least`, which NaN is not.
        if not is_number or not value >= least:
            raise ConfigError(f"{name}: expected {what} that is at least {least}, got {value!r}")

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if "_trainer" not in vars(self):
                object.__setattr__(self, name, value)
                return
            trainer = None if self._trainer is None else self._trainer()
            if trainer is None:
                raise FrozenInstanceError(f"{name}: these options belong to no trainer; use dataclasses.replace")
            trainer._set_option(name, value)

    def bound_to(self, trainer: Any) -> TrainerOptions:
        """Return a copy that belongs to a trainer; assignments to it call the `_set_option` of the trainer."""
        made = copy.copy(self)
        # Held weakly: the trainer holds its options.
        vars(made)["_trainer"] = weakref.ref(trainer)
        return made

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no trainer until `bound_to`.
        return {**vars(self), "_trainer": None}

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any], also_known: Collection[str]) -> TrainerOptions:
        """Return the options of a constructor call; an unknown keyword is an error that names the nearest."""
        for name in given:
            if name not in OPTION_NAMES:
                raise UnknownNameError("keyword", name, OPTION_NAMES.union(also_known), other_libraries.OPTIONS)
        return cls(**given)


def as_mode(mode: str) -> Literal["train", "test"]:
    """Return the mode of a trainer; raise if there is no such mode."""
    if mode in ("train", "test"):
        return cast(Literal["train", "test"], mode)
    raise ConfigError(f"mode: expected 'train' or 'test', got {mode!r}")


OPTION_NAMES = frozenset(field.name for field in fields(TrainerOptions))

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
_ACCEPTED: dict[str, tuple[str | None, ...]] = {
    "nonfinite": ("raise", "stop", "warn", "ignore"),
    "memory_format": ("channels_last", None),
    "best_mode": ("min", "max", None),
    "on_save_error": ("raise", "warn"),
}
