"""Other names for the same things: how users of lernomatic, zae-engine and plato know a trainer.

Nothing here trains. Each class is a mixin of `basic.Trainer` whose methods are one call of `fit`, `evaluate` or
`predict`, or one look at the history.
"""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer

from dovetail import checkpoint as store
from dovetail.callbacks import Callback
from dovetail.data import split_batch
from dovetail.errors import ConfigError, DataError
from dovetail.history import History
from dovetail.overrides import reject_lost_overrides
from dovetail.trainers import loop
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.fitting import restoring
from dovetail.trainers.options import as_mode
from dovetail.trainers.schedules.applied import set_lr
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.units import Epochs

__all__ = ["ClassicSpelling", "PlatoSpelling", "ProgressChecker", "RunSpelling", "own_hooks"]


class ClassicSpelling(SingleProcessTrainer):
    """lernomatic's names: `train()`, histories, rates and momentum as properties."""

    def train(self, trainset: Any = None, sampler: Any = None) -> float:
        """Train up to `num_epochs`, and return the seconds it took.

        Without arguments training goes on from the current epoch and writes checkpoints and history where the options
        say. With a `trainset` (plato's form) it is a new run over these data.

        Args:
            trainset: Training data, or None for `train_dataset`.
            sampler: Indices, a torch sampler, or an object with `.get()`; None for all data.
        """
        if trainset is None and sampler is not None:
            raise ConfigError("sampler: it chooses samples of a trainset; call train(trainset, sampler)")
        started = time.perf_counter()
        if trainset is not None and not self._is_default("train_model"):
            # A subclass that was written for plato trains there.
            cast(PlatoSpelling, self).train_model(dict(self.context.config), trainset, sampler)
        elif trainset is not None:
            self.reset()
            self.sampler = sampler
            self.forget_loaders()
            self.fit(trainset)
        else:
            self.saves_by_default = True
            self.fit()
        return time.perf_counter() - started

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
        return list(self.context.history.losses)

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
        return self.context.history.losses[-1] if self.context.history.losses else math.nan

    @property
    def cur_acc(self) -> float:
        """The accuracy of the last validation; NaN before the first."""
        return self.acc_history[-1] if self.acc_history else math.nan

    @property
    def train_loader(self) -> Any:
        """The training batches."""
        return self.loader("train")

    @property
    def val_loader(self) -> Any:
        """The validation batches."""
        return self.loader("valid")

    @property
    def test_loader(self) -> Any:
        """The test batches."""
        return self.loader("test")

    def set_learning_rate(self, rate: float, param_zero: bool = True) -> None:
        """Set the rate of the first parameter group, or of all."""
        groups = _groups(self.optimizer)
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
        """Take a written history in place of the present one."""
        self.context.history = History.load(path)

    def load_model_checkpoint(self, path: str | Path) -> None:
        """Take the weights of a checkpoint and nothing else."""
        self.model.load_state_dict(store.load(Path(path))["model"])

    def get_cur_loss(self) -> float:
        """Return `cur_loss`."""
        return self.cur_loss

    def get_cur_acc(self) -> float:
        """Return `cur_acc`."""
        return self.cur_acc

    def get_val_loss_history(self) -> list[float]:
        """Return `val_loss_history`."""
        return self.val_loss_history

    def get_acc_history(self) -> list[float]:
        """Return `acc_history`."""
        return self.acc_history

    def get_learning_rate(self) -> float:
        """Return `learning_rate`."""
        return self.learning_rate

    def get_momentum(self) -> float:
        """Return the momentum of the optimizer: `momentum`, or `betas[0]` of Adam and its kin."""
        group = _groups(self.optimizer)[0]
        return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))

    def set_momentum(self, value: float) -> None:
        """Set `momentum`."""
        self.momentum = value

    def get_model(self) -> Any:
        """Return the model."""
        return self.model

    def set_batch_size(self, number: int) -> None:
        """Set `batch_size`."""
        self.batch_size = number

    def set_num_epochs(self, number: int) -> None:
        """Set `num_epochs`."""
        self.num_epochs = number


class RunSpelling(SingleProcessTrainer):
    """zae-engine's names: `run`, `toggle`, `inference`, logs per epoch and the best weights."""

    loss_buffer: float = math.inf
    weight_buffer: dict[str, Any] | None = None
    run_log: _RunLog | None = None
    best_weights: _BestWeights | None = None

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
        self.mode = as_mode(mode or ("test" if self.mode == "train" else "train"))

    def inference(self, loader: Any) -> list[Any]:
        """Return what `test_step` gives under `"output"`, batch by batch; logs and counters stay as they are."""
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
        """Return further metrics from `log_train` or `log_test`, as `mode` says; called after each pass of `run`."""
        return None

    def check_better(self, epoch: int, loss: float) -> bool:
        """Keep a copy of the weights if `loss` is smaller than ever, and return whether it is."""
        if not loss < self.loss_buffer:
            return False
        self.loss_buffer = loss
        self.weight_buffer = {"epoch": epoch, "weight": _owned(self.model.state_dict())}
        return True

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
        if self.run_log is None:
            self.run_log = _RunLog(self)
            self.context.callbacks.add(self.run_log)
            self._follow_best()
        return self.run_log

    def _follow_best(self) -> None:
        """Ask `check_better` after every epoch from now on, and keep what it says in checkpoints."""
        if self.best_weights is None:
            self.best_weights = _BestWeights(self)
        # Asked last: `check_better` may look at the metrics of the log.
        self.context.callbacks.remove(self.best_weights)
        self.context.callbacks.add(self.best_weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken, with the best weights so far if they were followed."""
        with restoring("callbacks"):
            has_best = any(entry["name"] == _BestWeights.__name__ for entry in state["callbacks"])
        if has_best:
            self._follow_best()
        super().load_state_dict(state)


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


class PlatoSpelling(SingleProcessTrainer):
    """plato's names: hooks as methods, `train_model`, `test_model`, `test`, client ids."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, _INSTEAD)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hooks = own_hooks(self)
        if hooks is not None:
            self.context.callbacks.add(hooks, first=True)
        if self._train_step is None and not self._is_default("perform_forward_and_backward_passes"):
            self._train_step = _whole_step

    def train_run_start(self, config: Mapping[str, Any]) -> None:
        """Before the first batch of a run."""

    def train_run_end(self, config: Mapping[str, Any]) -> None:
        """After the last batch of a run."""

    def train_epoch_start(self, config: Mapping[str, Any]) -> None:
        """Before the first batch of an epoch."""

    def train_epoch_end(self, config: Mapping[str, Any]) -> None:
        """After an epoch."""

    def train_step_start(self, config: Mapping[str, Any], batch: Any = None) -> None:
        """Before a batch, with its index in the epoch."""

    def train_step_end(self, config: Mapping[str, Any], batch: Any = None, loss: Any = None) -> None:
        """After an update, with the index of its last batch and its detached loss."""

    def perform_forward_and_backward_passes(self, config: Mapping[str, Any], examples: Any, labels: Any) -> Any:
        """Override to own the whole step, optimizer included, and return the loss; not called otherwise."""
        raise NotImplementedError

    def train_model(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> None:
        """Run anew over `trainset` for `config["epochs"]` epochs with batches of `config["batch_size"]`."""
        self.reset()
        self.configure(config)
        self.sampler = sampler
        self.forget_loaders()
        self.fit(trainset)

    def test_model(self, config: Mapping[str, Any], testset: Any, sampler: Any = None) -> float:
        """Return the accuracy on `testset`, or its loss where accuracy has no meaning, or what the strategy says."""
        testing = self.strategies.testing
        if testing is not None:
            settings = {**self.context.config, "test_batch_size": self.test_batch_size, **config}
            with loop.looking(self._run_layer, "test"):
                return float(testing.test_model(self.model, settings, testset, sampler, self.context))
        size = int(config.get("batch_size", self.test_batch_size))
        metrics = self.evaluate(self.get_test_loader(size, testset, sampler))
        return metrics.get("accuracy", metrics["loss"])

    def test(self, testset: Any = None, sampler: Any = None) -> float:
        """Return the accuracy on `testset`, by default on the option `test_dataset`."""
        if testset is None:
            testset = self.context.run.data.get("test")
        if testset is None:
            raise DataError("no test data: pass it to the call, or test_dataset=… to the trainer")
        return self.test_model({}, testset, sampler)

    def set_client_id(self, client_id: int) -> None:
        """Say which client this trainer works for; 0 is the server."""
        self.context.client_id = client_id

    @property
    def client_id(self) -> int:
        """The client this trainer works for."""
        return self.context.client_id

    @property
    def run_history(self) -> History:
        """The history, by plato's name."""
        return self.context.history

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, else the last one that ran, counted from 1; 1 before the first."""
        return self.context.current_epoch


# What plato's trainers define and nothing here calls.
_INSTEAD = {
    "train_process": "override fit, or use the hooks train_run_start and train_run_end",
    "test_process": "override test_model, or give a testing_strategy",
    "lr_scheduler_step": "give an lr_scheduler_strategy with step(scheduler, context)",
    "_adjust_lr": "global_lr_scheduler in the settings continues the schedule from round to round",
    "simulate_sleep_time": "speed_simulation in the settings of clients simulates slow clients",
}


def own_hooks(trainer: PlatoSpelling) -> Callback | None:
    """Return a callback that calls the hook methods which a trainer's class overrides, or None if there are none."""
    events: dict[str, Any] = {}
    # Held weakly: the trainer holds its context, which holds this.
    reference = weakref.ref(trainer)

    def owner() -> PlatoSpelling:
        alive = reference()
        assert alive is not None, "hooks are called by the trainer that they belong to"
        return alive

    if trainer.customized_by("train_run_start"):
        events["on_train_start"] = lambda self, context: owner().train_run_start(context.config)
    if trainer.customized_by("train_run_end"):
        events["on_train_end"] = lambda self, context: owner().train_run_end(context.config)
    if trainer.customized_by("train_epoch_start"):
        events["on_epoch_start"] = lambda self, context: owner().train_epoch_start(context.config)
    if trainer.customized_by("train_epoch_end"):
        events["on_epoch_end"] = lambda self, context, metrics: owner().train_epoch_end(context.config)
    if trainer.customized_by("train_step_start"):
        events["on_step_start"] = lambda self, context, batch: owner().train_step_start(
            context.config, context.progress.batch
        )
    if trainer.customized_by("train_step_end"):

        def on_step_end(self: Callback, context: TrainingContext, output: Mapping[str, Any]) -> None:
            if context.run.window.closes:
                owner().train_step_end(context.config, context.progress.batch - 1, output["loss"].detach())

        events["on_step_end"] = on_step_end
    if not events:
        return None
    # A class that is made here can be pickled by what it is made from only.
    events["__reduce__"] = lambda self: (own_hooks, (owner(),))
    hooks: Callback = type("OwnHooks", (Callback,), events)()
    return hooks


def _whole_step(trainer: Any, batch: Any) -> dict[str, Any]:
    """Run a step that a subclass owns through `perform_forward_and_backward_passes`."""
    examples, labels = split_batch(batch)
    context = trainer.context
    notes = context.run.batch
    loss = trainer.perform_forward_and_backward_passes(context.config, examples, labels)
    if notes.optimized:
        # It went through the context, which counts and clips.
        return {"loss": loss}
    unused = {
        "accumulation_steps": context.run.window.size > 1,
        "gradient_clip": bool(trainer.options.gradient_clip),
        "precision='fp16'": context.precision is not None and context.precision.dtype is torch.float16,
        "several processes": context.process.has_peers,
        "training_step_strategy": "training_step" in trainer.strategies.given,
    }
    for name in (name for name, is_wanted in unused.items() if is_wanted):
        raise ConfigError(
            f"perform_forward_and_backward_passes makes its updates alone, so {name} would have no effect: call "
            "self.context.backward(loss) and self.context.step() in it, or override train_step"
        )
    notes.optimized = True
    notes.stepped.extend(context.optimizers[:1])
    return {"loss": loss}


class _OfARun(Callback):
    """A callback that belongs to one trainer."""

    def __init__(self, trainer: RunSpelling) -> None:
        # Held weakly: the trainer holds its context, which holds this.
        self._reference = weakref.ref(cast(RunSpelling, trainer.core))

    @property
    def _trainer(self) -> RunSpelling:
        trainer = self._reference()
        assert trainer is not None, "only the trainer that it belongs to calls it"
        return trainer

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._trainer,)


class _RunLog(_OfARun):
    """What the steps of `run` returned, copied to the host."""

    def __init__(self, trainer: RunSpelling) -> None:
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


class _BestWeights(_OfARun):
    """Asks `check_better` after every epoch, and keeps what it has found."""

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        validates = context.run.plan is not None and context.run.plan.validate is not None
        # The loss of training says nothing beside those of validation.
        if validates and context.run.validated_at != context.progress.batches:
            return
        loss = metrics.get("valid_loss", metrics.get("train_loss", math.nan))
        self._trainer.check_better(context.progress.epoch, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"loss_buffer": self._trainer.loss_buffer, "weight_buffer": self._trainer.weight_buffer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trainer.loss_buffer, self._trainer.weight_buffer = state["loss_buffer"], state["weight_buffer"]


def _keep(log: dict[str, list[Any]], output: Mapping[str, Any]) -> None:
    for name, value in output.items():
        log[name].append(_on_host(value))


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _owned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def _groups(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        raise ConfigError("the trainer has no model yet, and so no optimizer")
    return optimizer.param_groups
