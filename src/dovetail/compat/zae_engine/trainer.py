"""Trainer with zae-engine's names: `run`, `toggle`, `inference`, logs per epoch and the best weights."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from dovetail.compat.options import with_options
from dovetail.data import as_loader, to_device
from dovetail.errors import ConfigError
from dovetail.history import History
from dovetail.overrides import is_ours, reject_lost_overrides
from dovetail.trainers import trainer as main
from dovetail.trainers.addons.best_weights import BestWeights, TrainerPart
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.options import as_mode
from dovetail.trainers.run_scope import custom_evaluation
from dovetail.units import Epochs, Progress

# Methods that subclasses override in zae-engine, and that do not exist here.
_INSTEAD = {
    "run_epoch": "override train_epoch or val_epoch, or give a callback",
    "run_batch": "override a verb: train_step, backward, clip_gradients, optimizer_step or after_step",
}

# Methods that exist here, but that the training loop does not call.
_UNCALLED = {
    "print_log": "give a callback with on_report",
    "_to_device": "override to_device(batch)",
}


@with_options(("log_bar", "scheduler_step_on_batch", "gradient_clip"))
class Trainer(BestWeights, main.Trainer):
    """A trainer with zae-engine's names.

    Example:
        >>> x = torch.randn(64, 4); y = (x.sum(dim=1) > 0).long()
        >>> trainer = Trainer(torch.nn.Linear(4, 2), "cpu", log_bar=False)
        >>> history = trainer.run(2, (x, y))
        >>> trainer.progress_checker.get_epoch(), trainer.loss_buffer == min(history.get_metric_values("train_loss"))
        (3, True)
    """

    _has_defaults = True
    _run_log: _RunLog | None = None
    _run_loaders: tuple[Any, Any] = (None, None)

    if TYPE_CHECKING:
        log_bar: bool
        scheduler_step_on_batch: bool
        gradient_clip: float

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, _INSTEAD)
        for name in _UNCALLED.keys() & vars(cls).keys():
            if not is_ours(cls):
                warnings.warn(
                    f"{cls.__name__}.{name}: the loop does not call it; {_UNCALLED[name]}", UserWarning, stacklevel=2
                )

    @property
    def mode(self) -> str:
        """`"train"`, or `"test"` if `run` only evaluates."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = as_mode(mode)

    @property
    def scheduler(self) -> Any:
        """The first scheduler, or None."""
        return self.context.schedulers[0].scheduler if self.context.schedulers else None

    def run(self, n_epoch: int, loader: Any, valid_loader: Any = None) -> History:
        """Train `n_epoch` *more* epochs; in mode `"test"`, evaluate once.

        Args:
            n_epoch: Number of epochs to add to the finished ones.
            loader: Training data, in any form that `fit` accepts; the test data in mode `"test"`.
            valid_loader: Validation data, or None.
        """
        log = self._logged()
        self._run_loaders = (loader, valid_loader)
        if self.mode == "test":
            log.log_test.clear()
            self.test_metrics.update(self.evaluate(loader))
            # After the evaluation, because the method reads `log_test`.
            self.test_metrics.update(self.metric_on_epoch_end() or {})
            return self.context.history
        # `fit` counts epochs from the start of training, `run` counts further ones.
        return self.fit(loader, valid_loader, max_length=Epochs(self.context.progress.epoch + n_epoch))

    def toggle(self, mode: str | None = None) -> None:
        """Switch between `"train"` and `"test"`, or to the given mode."""
        self.mode = mode or ("test" if self.mode == "train" else "train")

    def inference(self, loader: Any) -> list[Any]:
        """Return the `"output"` of `test_step` for every batch.

        `log_test` contains the results of the steps; `log_train`, metrics, mode and counters are unchanged.
        """
        trainer, context = self._run_layer, self.context
        self._logged().log_test.clear()
        outputs = []
        # Not `predict`, because zae-engine returns the whole output of every step, batch by batch.
        with self._in_mode("test"), custom_evaluation(trainer, "predict", loader):
            for batch in trainer.batches("predict"):
                output = trainer.test_step(trainer.to_device(batch))
                for on_test_step_end in context.callbacks.on_test_step_end:
                    on_test_step_end(context, output)
                if "output" not in output:
                    raise ConfigError(
                        f"inference: test_step must return its outputs under 'output', got {sorted(output)}"
                    )
                outputs.append(_on_host(output["output"]))
            # In the order of the data, also if several processes share the batches.
            return trainer.gather(outputs)

    def metric_on_epoch_end(self) -> Mapping[str, float] | None:
        """Return further metrics, from `log_train` or, in mode `"test"`, `log_test`; called after each pass."""
        return None

    def apply_weights(self, filename: str | Path | None = None, strict: bool = True) -> None:
        """Load weights from a file, or the best weights of `run`."""
        if filename is not None:
            self.load_model(filename, strict=strict)
        elif self.weight_buffer is None:
            raise ConfigError("apply_weights: no best weights are known yet; run first, or give a file")
        else:
            self.model.load_state_dict(self.weight_buffer["weight"], strict=strict)

    def get_loss_history(self, mode: str = "train") -> list[float]:
        """Return the loss of every training batch, or with `"test"` of every validation."""
        history = self.context.history
        return list(history.losses) if as_mode(mode) == "train" else history.get_metric_values("valid_loss")

    def logging(self, step_dict: Mapping[str, Any]) -> None:
        """Append the values of a step to `log_train`, or in mode `"test"` to `log_test`; `run` calls it per step."""
        log = self.log_train if self.mode == "train" else self.log_test
        for name, value in step_dict.items():
            log[name].append(_on_host(value))

    def log_reset(self, epoch_end: bool = False) -> None:
        """Clear both logs; `run` calls it before each epoch.

        Args:
            epoch_end: Whether to clear `train_metrics` and `test_metrics`, too.
        """
        log = self._logged()
        log.log_train.clear()
        log.log_test.clear()
        if epoch_end:
            log.train_metrics.clear()
            log.test_metrics.clear()

    def print_log(self, cur_batch: int, num_batch: int) -> dict[str, str]:
        """Return the means of the log of the current mode as text, with the batch and the learning rate.

        Args:
            cur_batch: The number of the batch, counted from 1.
            num_batch: The number of batches of the pass.
        """
        log = self.log_train if self.mode == "train" else self.log_test
        rate = 0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])
        # The mean of model outputs is not useful.
        means = {name: f"{_mean(values):.6f}" for name, values in log.items() if values and "output" not in name}
        return {"Batch": f"{cur_batch}/{num_batch}", "LR": f"{rate:.3e}", **means}

    @property
    def loader(self) -> Any:
        """The last data given to `run`; None before."""
        return self._run_loaders[0]

    @property
    def valid_loader(self) -> Any:
        """The last validation data given to `run`; None if there was none."""
        return self._run_loaders[1]

    @property
    def batch_size(self) -> int | None:
        """The batch size of `loader`; None before `run`, and if `loader` is not a `DataLoader`."""
        return None if self.loader is None else _batch_size_of(self.loader, self._batch_size("train"))

    @property
    def valid_batch_size(self) -> int | None:
        """The batch size of `valid_loader`; 0 if there is none, None before `run`."""
        if self.valid_loader is None:
            return None if self.loader is None else 0
        return _batch_size_of(self.valid_loader, self._batch_size("valid"))

    @property
    def n_data(self) -> int | None:
        """The number of samples of `loader`; None before `run`, and if it is unknown."""
        return None if self.loader is None else _num_samples(self.loader)

    @property
    def n_valid_data(self) -> int | None:
        """The number of samples of `valid_loader`; 0 if there is none, None before `run`."""
        if self.valid_loader is None:
            return None if self.loader is None else 0
        return _num_samples(self.valid_loader)

    def val_epoch(self) -> Mapping[str, float] | None:
        """Run one validation pass in mode `"test"`."""
        with self._in_mode("test"):
            return super().val_epoch()

    @property
    def progress_checker(self) -> ProgressChecker:
        """The current step and epoch, counted from 1."""
        return ProgressChecker(self.context)

    @property
    def log_train(self) -> dict[str, list[Any]]:
        """The results of `train_step` in the current epoch of `run`, by name, batch by batch."""
        return self._logged().log_train

    @property
    def log_test(self) -> dict[str, list[Any]]:
        """The results of `test_step` in the last validation of `run` or in `inference`, by name, batch by batch."""
        return self._logged().log_test

    @property
    def train_metrics(self) -> dict[str, float]:
        """The training metrics of the last epoch of `run`."""
        return self._logged().train_metrics

    @property
    def test_metrics(self) -> dict[str, float]:
        """The validation metrics of the last epoch of `run`."""
        return self._logged().test_metrics

    def _to_cpu(self, *values: Any) -> Any:
        """Return a value on the host without its gradient; several values as a tuple."""
        moved = tuple(map(_on_host, values))
        return moved[0] if len(moved) == 1 else moved

    def _to_device(self, *values: Any, **named: Any) -> Any:
        """Return a value on the trainer's device; several values as a tuple, named values as a dictionary."""
        if named:
            return to_device(named, self.context.device)
        moved = to_device(values, self.context.device)
        return moved[0] if len(moved) == 1 else moved

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        """Set the mode, and restore the previous one after the block."""
        before = self.mode
        self.mode = mode
        try:
            yield
        finally:
            self.mode = before

    def _logged(self) -> _RunLog:
        if self._run_log is None:
            self._run_log = _RunLog(self)
            # On first use: a trainer that only calls `fit` does not copy every step's results to the host.
            self.context.callbacks.add(self._run_log)
            self._follow_best()
        return self._run_log


class ProgressChecker:
    """The current step and epoch of a trainer, counted from 1.

    Args:
        context: The context of the trainer; None means a separate counter.

    Example:
        >>> checker = ProgressChecker()
        >>> checker.update_step()
        >>> checker.get_step(), checker.get_epoch()
        (2, 1)
    """

    def __init__(self, context: TrainingContext | None = None) -> None:
        # The trainer's own counters, so that `set_epoch` has an effect on the next run.
        self._progress = Progress() if context is None else context.progress

    def get_step(self) -> int:
        """Return the number of the current batch."""
        return self._progress.batches + 1

    def get_epoch(self) -> int:
        """Return the number of the current epoch."""
        return self._progress.epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the current epoch."""
        self._progress.epoch = epoch - 1

    def update_step(self) -> None:
        """Count a batch."""
        self._progress.batches += 1

    def update_epoch(self) -> None:
        """Count an epoch."""
        self._progress.epoch += 1

    def init_state(self) -> None:
        """Reset both counters to 1."""
        self._progress.epoch = self._progress.batches = 0


class _RunLog(TrainerPart):
    """Records the results of the steps of `run`, copied to the host."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.log_train: dict[str, list[Any]] = defaultdict(list)
        self.log_test: dict[str, list[Any]] = defaultdict(list)
        self.train_metrics: dict[str, float] = {}
        self.test_metrics: dict[str, float] = {}

    def on_epoch_start(self, context: TrainingContext) -> None:
        self._trainer.log_reset()

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        self._trainer.logging(output)

    def on_validation_start(self, context: TrainingContext) -> None:
        self.log_test.clear()

    def on_test_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        with self._trainer._in_mode("test"):
            self._trainer.logging(output)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        trainer = self._trainer
        for stage, prefix, into in (("train", "train_", self.train_metrics), ("test", "valid_", self.test_metrics)):
            found = {name[len(prefix) :]: value for name, value in metrics.items() if name.startswith(prefix)}
            if not found:
                continue
            # `metric_on_epoch_end` chooses its log by the mode, and is called once for each.
            with trainer._in_mode(stage):
                further = dict(trainer.metric_on_epoch_end() or {})
            into.update({**found, **further})
            for name, value in further.items():
                context.history.update_metric(prefix + name, value)


def _batch_size_of(data: Any, default: int) -> int | None:
    loader = as_loader(data, batch_size=default)
    return loader.batch_size if isinstance(loader, DataLoader) else None


def _num_samples(data: Any) -> int | None:
    loader = as_loader(data, batch_size=1)
    return len(loader.dataset) if isinstance(loader, DataLoader) and isinstance(loader.dataset, Sized) else None


def _mean(values: list[Any]) -> float:
    """Return the mean of all numbers in the logged values of one name."""
    # Values of one name may differ in shape: the last batch is smaller.
    return float(torch.cat([torch.as_tensor(value, dtype=torch.double).flatten() for value in values]).mean())


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
