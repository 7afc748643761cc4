"""Trainer with lernomatic's names: every option as an attribute, `train()`, and histories as lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from dovetail.compat.options import with_options
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.history import History
from dovetail.overrides import reject_lost_overrides
from dovetail.trainers import trainer as main
from dovetail.trainers.addons.best_weights import TrainerPart
from dovetail.trainers.attributes import reject_option_names
from dovetail.trainers.context import Plan, Stage, TrainingContext
from dovetail.trainers.devices import as_device
from dovetail.trainers.optimization import RATES
from dovetail.trainers.options import OPTION_NAMES
from dovetail.trainers.schedules.applied import set_lr
from dovetail.units import TrainUnit, check_count

__all__ = ["Trainer"]


def _config(name: str) -> Callable[[Any], Any]:
    return lambda trainer: int(trainer.context.config[name])


def _data(stage: str) -> Callable[[Any], Any]:
    return lambda trainer: trainer.context.run.data.get(stage)


def _piece(option: str, role: str) -> Callable[[Any], Any]:
    """Return a function that reads a given strategy, or else the option."""

    def read(trainer: Any) -> Any:
        strategies = trainer.strategies
        return getattr(strategies, role) if role in strategies.given else getattr(trainer.options, option)

    return read


def _first_group(trainer: Any) -> dict[str, Any]:
    optimizer = trainer.optimizer
    return {} if optimizer is None else optimizer.param_groups[0]


def _learning_rate(trainer: Any) -> float:
    group = _first_group(trainer)
    return float(group["lr"]) if "lr" in group else trainer.options.learning_rate


def _momentum(trainer: Any) -> float:
    # A schedule or an assignment of the momentum sets `betas[0]` of Adam and similar optimizers.
    group, options = _first_group(trainer), trainer.options
    if "betas" in group and (options.mtm_scheduler is not None or "momentum" in trainer._optimization.assigned):
        return float(group["betas"][0])
    return float(group.get("momentum", options.momentum))


# Attributes whose value is not the option itself but the value in use.
_READS: dict[str, Callable[[Any], Any]] = {
    "num_epochs": _config("epochs"),
    "batch_size": _config("batch_size"),
    "val_batch_size": lambda trainer: trainer._batch_size("valid"),
    "test_batch_size": lambda trainer: trainer._batch_size("test"),
    "learning_rate": _learning_rate,
    "momentum": _momentum,
    "weight_decay": lambda trainer: float(_first_group(trainer).get("weight_decay", trainer.options.weight_decay)),
    "loss_function": _piece("loss_function", "loss"),
    "optim_function": _piece("optim_function", "optimizer"),
    "lr_scheduler": _piece("lr_scheduler", "lr_scheduler"),
    "train_dataset": _data("train"),
    "val_dataset": _data("valid"),
    "test_dataset": _data("test"),
    # In lernomatic, -1 is the CPU.
    "device_id": lambda trainer: -1 if trainer.device.type == "cpu" else trainer.device.index or 0,
}


# The keys of `get_trainer_params`. `load_checkpoint` restores the second group in addition to the state of the run. The
# first group is in the state of the optimizer, and no class is built from a name in a file.
_STATE = ("learning_rate", "momentum", "weight_decay", "loss_function", "optim_function", "cur_epoch", "iter_per_epoch")
_SETTINGS = ("num_epochs", "save_every", "print_every", "batch_size", "val_batch_size", "shuffle")

# Methods that subclasses override in lernomatic, and that do not exist here.
_INSTEAD = {
    "_init_optimizer": "override get_optimizer(model) and get_loss_criterion(), or pass optimizer= and criterion=",
    "_init_dataloaders": "pass train_dataset=, val_dataset= and test_dataset=, which also take a DataLoader",
    "_init_device": "pass device_id= or device=",
    "_init_history": "the history needs no size; further numbers that train_step returns are in it, too",
    "_send_to_device": "the trainer moves its model; pass device_id= or device=",
    "apply_lr_schedule": "pass lr_scheduler=, a schedule with at(count)",
    "apply_mtm_schedule": "pass mtm_scheduler=, a schedule with at(count)",
}

_WRITTEN = (
    "the trainer writes its own histories: return the loss from train_step, or call in your own train_epoch "
    "self.history.extend_losses([loss.item()])"
)


# In lernomatic, loops write losses into arrays of a fixed size. Here an assignment would be lost in a copy, so it
# raises.
class _Values(list[float]):
    """A history as a read-only list."""

    def __setitem__(self, *item: Any) -> NoReturn:
        raise ConfigError(_WRITTEN)


def _length_of(name: str, meaning: str) -> property:
    """Return a property that is the length of a history."""

    def refuse(trainer: Any, value: Any) -> NoReturn:
        raise ConfigError(_WRITTEN)

    return property(lambda trainer: len(getattr(trainer, name)), refuse, doc=meaning)


@with_options(OPTION_NAMES, _READS)
class Trainer(main.Trainer):
    """A trainer with lernomatic's names.

    Every option is an attribute that can be read and assigned; an assignment goes to `trainer.options`.
    `learning_rate`, `momentum` and `weight_decay` are read from the first parameter group, and an assignment sets
    every group. `num_epochs` and the batch sizes are read from the present configuration, and the data sets are the
    ones in use. `load_checkpoint` also restores `num_epochs`, `batch_size`, `val_batch_size`, `shuffle`, `save_every`
    and `print_every`; `fit(resume=…)` keeps the present values.

    Example:
        >>> import torch
        >>> x = torch.randn(64, 4); y = (x.sum(dim=1) > 0).long()
        >>> trainer = Trainer(torch.nn.Linear(4, 2), train_dataset=(x, y), save_every=0, verbose=False)
        >>> trainer.num_epochs, trainer.learning_rate = 2, 0.5
        >>> seconds = trainer.train()
        >>> trainer.cur_epoch, len(trainer.loss_history)
        (2, 2)
    """

    _has_defaults = True

    if TYPE_CHECKING:
        # Attributes that `with_options` adds.
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    # The assigned best accuracy, and the number of accuracies that were known at that time.
    _best_acc: tuple[float, int] = (0.0, 0)
    _has_new_best: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, _INSTEAD)
        reject_option_names(cls)

    @property
    def cur_epoch(self) -> int:
        """Number of finished epochs, from which `train` continues; an assignment starts a new pass over the data."""
        return self.context.progress.epoch

    @cur_epoch.setter
    def cur_epoch(self, epoch: int) -> None:
        check_count("cur_epoch", epoch, 0)
        if self.context.run.trainer is not None:
            raise ConfigError("cur_epoch: the trainer is running and counts epochs itself; assign it before a run")
        # An epoch is never resumed in its middle after such an assignment.
        self.context.progress.epoch, self.context.progress.batch = epoch, 0

    @property
    def start_epoch(self) -> int:
        """The epoch from which `train` continues: `cur_epoch`."""
        return self.cur_epoch

    @start_epoch.setter
    def start_epoch(self, epoch: int) -> None:
        self.cur_epoch = epoch

    @property
    def best_acc(self) -> float:
        """The best validation accuracy so far, 0 before the first; `best_<name>` is written only for a better one."""
        # Accuracies that were known when the user assigned a value do not count again.
        value, known = self._best_acc
        return max([value, *self.acc_history[known:]])

    @best_acc.setter
    def best_acc(self, accuracy: float) -> None:
        self._best_acc, self._has_new_best = (float(accuracy), len(self.acc_history)), True
        self._share_best()

    @property
    def device(self) -> torch.device:
        """The device of the model and of the batches that steps receive."""
        return self.context.device

    @device.setter
    def device(self, device: str | int | torch.device) -> None:
        wanted = as_device(device)
        device_id = -1 if wanted.type == "cpu" else wanted.index or 0
        if (meant := as_device(None, device_id)).type != wanted.type:
            raise ConfigError(f"device: expected the CPU or {meant.type}, got {str(wanted)!r}; pass device= instead")
        self.options.device_id = device_id

    @property
    def optimizer(self) -> Any:
        """The first optimizer, created now if necessary; None without a model."""
        return super().optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.options.optim_function = optimizer

    @property
    def criterion(self) -> Any:
        """The loss, which a run builds; assigning it sets the option `loss_function`."""
        # The trainer's own attribute of this name, which the property hides.
        return vars(self)["criterion"]

    @criterion.setter
    def criterion(self, loss: Any) -> None:
        # None, and assignments while a trainer runs, come from the trainer itself.
        if loss is None or self.context.run.trainer is not None:
            vars(self)["criterion"] = loss
        else:
            self.options.loss_function = loss

    @property
    def loss_history(self) -> list[float]:
        """The loss of every training batch."""
        return _Values(self.history.losses)

    @property
    def val_loss_history(self) -> list[float]:
        """The loss of every validation."""
        return _Values(self.context.history.get_metric_values("valid_loss"))

    @property
    def acc_history(self) -> list[float]:
        """The accuracy of every validation."""
        return _Values(self.context.history.get_metric_values("valid_accuracy"))

    loss_iter = _length_of("loss_history", "The number of training batches so far.")
    val_loss_iter = _length_of("val_loss_history", "The number of validations so far.")
    acc_iter = _length_of("acc_history", "The number of validations with an accuracy so far.")

    @property
    def iter_per_epoch(self) -> int:
        """The number of training batches per epoch; 0 if there is no data or the number is unknown."""
        return 0 if self.train_loader is None else self._data.num_batches("train", self.train_loader) or 0

    @property
    def cur_loss(self) -> float:
        """The loss of the last training batch; NaN before the first."""
        return self.history.losses[-1] if self.history.losses else math.nan

    @property
    def cur_acc(self) -> float:
        """The accuracy of the last validation; NaN before the first."""
        return self.acc_history[-1] if self.acc_history else math.nan

    @property
    def train_loader(self) -> Any:
        """The training batches; None if there is no data. Batches can be assigned."""
        return self._stage_loader("train")

    @train_loader.setter
    def train_loader(self, loader: Any) -> None:
        self.set_train_dataset(loader)

    @property
    def val_loader(self) -> Any:
        """The validation batches; None if there is no data. Batches can be assigned."""
        return self._stage_loader("valid")

    @val_loader.setter
    def val_loader(self, loader: Any) -> None:
        self.set_val_dataset(loader)

    @property
    def test_loader(self) -> Any:
        """The test batches; None if there is no data. Batches can be assigned."""
        return self._stage_loader("test")

    @test_loader.setter
    def test_loader(self, loader: Any) -> None:
        self.set_test_dataset(loader)

    def test_epoch(self) -> Mapping[str, float] | None:
        """Return the metrics of the test data; `train` calls it after every epoch if there is test data.

        The metrics are in the history: `test_loss`, `test_accuracy`. An override may return None.
        """
        return self.evaluate(stage="test")

    def plan(self, **periods: TrainUnit | Mapping[str, int] | None) -> Plan:
        """Return the plan of a `fit`; its best checkpoints start from an assigned `best_acc`."""
        plan = super().plan(**periods)
        self._share_best()
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer, with the settings that `load_checkpoint` restores."""
        return super().state_dict() | {"trainer_params": {name: getattr(self.options, name) for name in _SETTINGS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`, with its settings unless a running `fit` resumes."""
        # `fit(resume=…)` keeps the options of its call; only `load_checkpoint` restores saved ones.
        if self.context.run.trainer is None:
            saved = state.get("trainer_params", {})
            self._set_options({name: saved[name] for name in _SETTINGS if name in saved})
        super().load_state_dict(state)

    def set_learning_rate(self, rate: float, param_zero: bool = True) -> None:
        """Set the learning rate of the first parameter group, or of all groups."""
        groups = self._groups()
        for group in groups[:1] if param_zero else groups:
            set_lr(group, rate)

    def set_train_dataset(self, data: Any) -> None:
        """Train on this data from now on."""
        self.context.run.data["train"] = data

    def set_val_dataset(self, data: Any) -> None:
        """Validate on this data from now on."""
        self.context.run.data["valid"] = data

    def set_test_dataset(self, data: Any) -> None:
        """Test on this data from now on."""
        self.context.run.data["test"] = data

    def save_history(self, path: str | Path) -> None:
        """Write the history as JSON lines."""
        self.context.history.save(path)

    def load_history(self, path: str | Path) -> None:
        """Replace the history by the one in a file."""
        self.context.history = History.load(path)

    def load_model_checkpoint(self, path: str | Path) -> None:
        """Load only the weights of a checkpoint."""
        self.load_model(path)

    def get_cur_loss(self) -> float:
        """Return `cur_loss`."""
        return self.cur_loss

    def get_cur_acc(self) -> float:
        """Return `cur_acc`."""
        return self.cur_acc

    def get_loss_history(self) -> list[float]:
        """Return `loss_history`."""
        return self.loss_history

    def get_val_loss_history(self) -> list[float]:
        """Return `val_loss_history`."""
        return self.val_loss_history

    def get_acc_history(self) -> list[float]:
        """Return `acc_history`."""
        return self.acc_history

    def get_learning_rate(self) -> float:
        """Return `learning_rate`."""
        return _learning_rate(self)

    def get_momentum(self) -> float:
        """Return the momentum of the optimizer: `momentum`, or `betas[0]` of Adam and similar optimizers."""
        group = self._groups()[0]
        return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))

    def set_momentum(self, value: float) -> None:
        """Set `momentum`."""
        self.options.momentum = value

    def get_model(self) -> Any:
        """Return the model."""
        return self.model

    def get_model_params(self) -> dict[str, Any] | None:
        """Return the weights of the model; None without a model."""
        return None if self.model is None else dict(self.model.state_dict())

    def get_trainer_params(self) -> dict[str, Any]:
        """Return the settings of the run by name: lengths, rates, names of loss and optimizer, batch sizes."""
        return {name: getattr(self, name) for name in (*_STATE, *_SETTINGS)}

    def set_trainer_params(self, params: Mapping[str, Any]) -> None:
        """Assign the settings that `get_trainer_params` returned; equal values are not assigned."""
        for name in params:
            if name not in (*_STATE, *_SETTINGS):
                raise UnknownNameError("trainer parameter", name, (*_STATE, *_SETTINGS))
        self._set_options({name: params[name] for name in params if name in OPTION_NAMES})
        if "cur_epoch" in params and params["cur_epoch"] != self.cur_epoch:
            self.cur_epoch = params["cur_epoch"]

    def get_lr_scheduler(self, config: Mapping[str, Any] | None = None, optimizer: Any = None) -> Any:
        """Return `lr_scheduler`; for an optimizer, the scheduler that the trainer builds for it."""
        return self.lr_scheduler if optimizer is None else super().get_lr_scheduler(config or {}, optimizer)

    def set_lr_scheduler(self, lr_scheduler: Any) -> None:
        """Set `lr_scheduler`; its counter starts now."""
        self.options.lr_scheduler = lr_scheduler

    def get_mtm_scheduler(self) -> Any:
        """Return `mtm_scheduler`."""
        return self.options.mtm_scheduler

    def set_mtm_scheduler(self, mtm_scheduler: Any) -> None:
        """Set `mtm_scheduler`; its counter starts now."""
        self.options.mtm_scheduler = mtm_scheduler

    def get_num_epochs(self) -> int:
        """Return `num_epochs`."""
        return int(self.num_epochs)

    def get_cur_epoch(self) -> int:
        """Return `cur_epoch`."""
        return self.cur_epoch

    def get_cur_epoch_loss(self) -> list[float]:
        """Return the losses of the last `iter_per_epoch` training batches."""
        return self.loss_history[-self.iter_per_epoch :] if self.iter_per_epoch else []

    def get_cur_val_loss(self) -> float:
        """Return the loss of the last validation; NaN before the first."""
        return self.val_loss_history[-1] if self.val_loss_history else math.nan

    def set_batch_size(self, number: int) -> None:
        """Set `batch_size`."""
        self.options.batch_size = number

    def set_num_epochs(self, number: int) -> None:
        """Set `num_epochs`."""
        self.options.num_epochs = number

    def _train_here(self, trainset: Any, sampler: Any) -> float:
        # Only `train` tests after every epoch, as in lernomatic; `fit` does not.
        tests = _TestEpochs(self)
        self.context.callbacks.add(tests)
        try:
            return super()._train_here(trainset, sampler)
        finally:
            self.context.callbacks.remove(tests)

    def _stage_loader(self, stage: Stage) -> Any:
        return None if self.context.run.data.get(stage) is None else self._loader(stage)

    def _set_options(self, values: Mapping[str, Any]) -> None:
        """Assign the options that differ, because assigning even the same optimizer would build a new one."""
        for name, value in values.items():
            # An option may have another form than the value in use: 0 for `val_batch_size`, a name for a strategy. The
            # current rates are stored in the optimizer only.
            present = [getattr(self, name), *([] if name in RATES else [getattr(self.options, name)])]
            if value not in present:
                setattr(self.options, name, value)

    def _share_best(self) -> None:
        """Pass an assigned `best_acc` to the writer of checkpoints, if it compares accuracies."""
        saver = self.context.run.saver
        if self._has_new_best and saver is not None and self.options.best_metric in (None, "valid_accuracy"):
            # Handed over once: afterwards, the writer of checkpoints follows the best value itself.
            saver.best, self._has_new_best = self._best_acc[0], False

    def _groups(self) -> list[dict[str, Any]]:
        optimizer: Optimizer | None = self.optimizer
        if optimizer is None:
            raise ConfigError("the trainer has no model yet, and therefore no optimizer")
        return optimizer.param_groups


class _TestEpochs(TrainerPart):
    """Calls `test_epoch` after every epoch of `train` if there are test data, and records its metrics."""

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        if context.run.data.get("test") is None:
            return
        progress = context.progress
        if means := self._trainer.test_epoch():
            position = {"epoch": progress.epoch, "batches": progress.batches, "updates": progress.updates}
            context.history.record("test", means, **position)
