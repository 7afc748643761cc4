"""lernomatic's names: every option as an attribute, `train()`, and histories as lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.compat.options import with_options
from dovetail.errors import ConfigError
from dovetail.history import History
from dovetail.trainers import trainer as main
from dovetail.trainers.attributes import reject_option_names
from dovetail.trainers.options import OPTION_NAMES
from dovetail.trainers.schedules.applied import set_lr

__all__ = ["Trainer"]


def _config(name: str) -> Callable[[Any], Any]:
    return lambda trainer: int(trainer.context.config[name])


def _data(stage: str) -> Callable[[Any], Any]:
    return lambda trainer: trainer.context.run.data.get(stage)


def _piece(option: str, role: str) -> Callable[[Any], Any]:
    """Return a function that reads a strategy that was given, or else the option."""

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
    # `betas[0]` of Adam and its kin is the momentum as soon as a schedule or an assignment has set it.
    group, options = _first_group(trainer), trainer.options
    if "betas" in group and (options.mtm_scheduler is not None or "momentum" in trainer._optimization.assigned):
        return float(group["betas"][0])
    return float(group.get("momentum", options.momentum))


# Attributes that are more than the option: the number that is in use.
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
    "device_id": lambda trainer: -1 if trainer.device.type == "cpu" else trainer.device.index or 0,
}


@with_options(OPTION_NAMES, _READS)
class Trainer(main.Trainer):
    """A trainer with lernomatic's names.

    Every option is an attribute that can be read and assigned; an assignment goes to `trainer.options`.
    `learning_rate`, `momentum` and `weight_decay` are those of the first parameter group, and assigning them sets
    every group. `num_epochs` and the batch sizes are those of the present configuration, and the data sets those in
    use.

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_option_names(cls)

    @property
    def cur_epoch(self) -> int:
        """Epochs done."""
        return self.context.progress.epoch

    @property
    def best_acc(self) -> float:
        """The best validation accuracy so far, 0 before the first."""
        return max(self.acc_history, default=0.0)

    @property
    def loss_history(self) -> list[float]:
        """The loss of every training batch."""
        return list(self.history.losses)

    @property
    def val_loss_history(self) -> list[float]:
        """The loss of every validation."""
        return self.context.history.get_metric_values("valid_loss")

    @property
    def acc_history(self) -> list[float]:
        """The accuracy of every validation."""
        return self.context.history.get_metric_values("valid_accuracy")

    @property
    def cur_loss(self) -> float:
        """The loss of the last training batch; NaN before the first."""
        return self.loss_history[-1] if self.history.losses else math.nan

    @property
    def cur_acc(self) -> float:
        """The accuracy of the last validation; NaN before the first."""
        return self.acc_history[-1] if self.acc_history else math.nan

    @property
    def train_loader(self) -> Any:
        """The training batches."""
        return self._loader("train")

    @property
    def val_loader(self) -> Any:
        """The validation batches."""
        return self._loader("valid")

    @property
    def test_loader(self) -> Any:
        """The test batches."""
        return self._loader("test")

    def set_learning_rate(self, rate: float, param_zero: bool = True) -> None:
        """Set the rate of the first parameter group, or of all."""
        groups = self._groups()
        for group in groups[:1] if param_zero else groups:
            set_lr(group, rate)

    def set_train_dataset(self, data: Any) -> None:
        """Train on these data from now on."""
        self.context.run.data["train"] = data

    def set_val_dataset(self, data: Any) -> None:
        """Validate on these data from now on."""
        self.context.run.data["valid"] = data

    def set_test_dataset(self, data: Any) -> None:
        """Test on these data from now on."""
        self.context.run.data["test"] = data

    def save_history(self, path: str | Path) -> None:
        """Write the history as JSON lines."""
        self.context.history.save(path)

    def load_history(self, path: str | Path) -> None:
        """Replace the present history by a written one."""
        self.context.history = History.load(path)

    def load_model_checkpoint(self, path: str | Path) -> None:
        """Load the weights of a checkpoint and nothing else."""
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
        """Return the momentum of the optimizer: `momentum`, or `betas[0]` of Adam and its kin."""
        group = self._groups()[0]
        return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))

    def set_momentum(self, value: float) -> None:
        """Set `momentum`."""
        self.options.momentum = value

    def get_model(self) -> Any:
        """Return the model."""
        return self.model

    def set_batch_size(self, number: int) -> None:
        """Set `batch_size`."""
        self.options.batch_size = number

    def set_num_epochs(self, number: int) -> None:
        """Set `num_epochs`."""
        self.options.num_epochs = number

    def _groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise ConfigError("the trainer has no model yet, and so no optimizer")
        return self.optimizer.param_groups
