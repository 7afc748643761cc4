"""zae-engine's trainer: `run`, `toggle`, `inference`, logs per epoch and the best weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dovetail.compat.options import with_options
from dovetail.errors import ConfigError
from dovetail.history import History
from dovetail.trainers import loop
from dovetail.trainers import trainer as main
from dovetail.trainers.addons.best_weights import BestWeights, TrainerPart
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.options import as_mode
from dovetail.units import Epochs


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

    if TYPE_CHECKING:
        log_bar: bool
        scheduler_step_on_batch: bool
        gradient_clip: float

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
            n_epoch: Epochs to add to those done.
            loader: Training data, in any form that `fit` takes; the test data in mode `"test"`.
            valid_loader: Validation data, or None.
        """
        log = self._logged()
        if self.mode == "test":
            log.log_test.clear()
            self.test_metrics.update(self.evaluate(loader))
            self.test_metrics.update(self.metric_on_epoch_end() or {})
            return self.context.history
        return self.fit(loader, valid_loader, max_length=Epochs(self.context.progress.epoch + n_epoch))

    def toggle(self, mode: str | None = None) -> None:
        """Switch between `"train"` and `"test"`, or to the one named."""
        self.mode = mode or ("test" if self.mode == "train" else "train")

    def inference(self, loader: Any) -> list[Any]:
        """Return the `"output"` of `test_step` for every batch; logs and counters stay unchanged."""
        trainer, context = self._run_layer, self.context
        outputs = []
        with loop.looking(trainer, "predict", loader):
            for batch in trainer.batches("predict"):
                output = trainer.test_step(trainer.to_device(batch))
                for on_test_step_end in context.callbacks.on_test_step_end:
                    on_test_step_end(context, output)
                if "output" not in output:
                    raise ConfigError(
                        f"inference: test_step must return its outputs under 'output', got {sorted(output)}"
                    )
                outputs.append(_on_host(output["output"]))
            return trainer.gather(outputs)

    def metric_on_epoch_end(self) -> Mapping[str, float] | None:
        """Return more metrics, from `log_train` or, in mode `"test"`, `log_test`; called after each pass of `run`."""
        return None

    def apply_weights(self, filename: str | Path | None = None, strict: bool = True) -> None:
        """Load weights from a file, or the best ones that `run` has seen."""
        if filename is not None:
            self.load_model(filename, strict=strict)
        elif self.weight_buffer is None:
            raise ConfigError("apply_weights: no best weights are known yet; run first, or name a file")
        else:
            self.model.load_state_dict(self.weight_buffer["weight"], strict=strict)

    def get_loss_history(self, mode: str = "train") -> list[float]:
        """Return the loss of every training batch, or with `"test"` of every validation."""
        history = self.context.history
        return list(history.losses) if mode == "train" else history.get_metric_values("valid_loss")

    @property
    def progress_checker(self) -> ProgressChecker:
        """Steps and epochs, counted from 1."""
        return ProgressChecker(self.context)

    @property
    def log_train(self) -> dict[str, list[Any]]:
        """What `train_step` returned in the running epoch of `run`, by name, batch by batch."""
        return self._logged().log_train

    @property
    def log_test(self) -> dict[str, list[Any]]:
        """What `test_step` returned in the last validation of `run`, by name, batch by batch."""
        return self._logged().log_test

    @property
    def train_metrics(self) -> dict[str, float]:
        """The training metrics of the last epoch of `run`."""
        return self._logged().train_metrics

    @property
    def test_metrics(self) -> dict[str, float]:
        """The validation metrics of the last epoch of `run`."""
        return self._logged().test_metrics

    def _logged(self) -> _RunLog:
        if self._run_log is None:
            self._run_log = _RunLog(self)
            self.context.callbacks.add(self._run_log)
            self._follow_best()
        return self._run_log


class ProgressChecker:
    """Steps and epochs of a trainer, counted from 1: the numbers of the running ones.

    Example:
        >>> checker = ProgressChecker(TrainingContext())
        >>> checker.get_step(), checker.get_epoch()
        (1, 1)
    """

    def __init__(self, context: TrainingContext) -> None:
        self._progress = context.progress

    def get_step(self) -> int:
        """Return the number of the running batch."""
        return self._progress.batches + 1

    def get_epoch(self) -> int:
        """Return the number of the running epoch."""
        return self._progress.epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the running one."""
        self._progress.epoch = epoch - 1

    def update_step(self) -> None:
        """Count a batch."""
        self._progress.batches += 1

    def update_epoch(self) -> None:
        """Count an epoch."""
        self._progress.epoch += 1

    def init_state(self) -> None:
        """Start again at 1."""
        self._progress.epoch = self._progress.batches = 0


class _RunLog(TrainerPart):
    """What the steps of `run` returned, copied to the host."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.log_train: dict[str, list[Any]] = defaultdict(list)
        self.log_test: dict[str, list[Any]] = defaultdict(list)
        self.train_metrics: dict[str, float] = {}
        self.test_metrics: dict[str, float] = {}

    def on_epoch_start(self, context: TrainingContext) -> None:
        self.log_train.clear()

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        _keep(self.log_train, output)

    def on_validation_start(self, context: TrainingContext) -> None:
        self.log_test.clear()

    def on_test_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        if context.stage != "predict":
            _keep(self.log_test, output)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        trainer = self._trainer
        mode = trainer.mode
        for stage, prefix, into in (("train", "train_", self.train_metrics), ("test", "valid_", self.test_metrics)):
            found = {name[len(prefix) :]: value for name, value in metrics.items() if name.startswith(prefix)}
            if not found:
                continue
            trainer.toggle(stage)
            try:
                further = dict(trainer.metric_on_epoch_end() or {})
            finally:
                trainer.toggle(mode)
            into.update({**found, **further})
            for name, value in further.items():
                context.history.update_metric(prefix + name, value)


def _keep(log: dict[str, list[Any]], output: Mapping[str, Any]) -> None:
    for name, value in output.items():
        log[name].append(_on_host(value))


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
