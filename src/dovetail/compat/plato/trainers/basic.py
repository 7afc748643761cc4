"""plato's trainer: hooks as methods, `train_model`, `test_model`, `test` and client ids."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dovetail.callbacks import Callback, CallbackHandler
from dovetail.data import split_batch
from dovetail.errors import ConfigError, DataError
from dovetail.history import History
from dovetail.overrides import reject_lost_overrides
from dovetail.trainers import trainer as main
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.own_steps import count_own_update
from dovetail.trainers.reuse import fit_new_run
from dovetail.trainers.testing import accuracy_on

__all__ = ["Trainer"]

# Methods of plato's trainers that nothing here calls, and what to use instead.
_INSTEAD = {
    "train_process": "override fit, or use the hooks train_run_start and train_run_end",
    "test_process": "override test_model, or give a testing_strategy",
    "lr_scheduler_step": "give an lr_scheduler_strategy with step(scheduler, context)",
    "_adjust_lr": "global_lr_scheduler in the settings continues the schedule from round to round",
    "simulate_sleep_time": "speed_simulation in the settings of clients simulates slow clients",
}


class Trainer(main.Trainer):
    """A trainer with plato's names.

    A subclass overrides hooks (`train_run_start`, `train_epoch_start`, `train_step_start` and their ends), a step that
    makes the update itself (`perform_forward_and_backward_passes`), or `train_model` and `test_model`.

    Example:
        >>> class Counting(Trainer):
        ...     updates = 0
        ...     def train_step_end(self, config, batch=None, loss=None):
        ...         self.updates += 1
        >>> trainer = Counting(torch.nn.Linear(4, 2), verbose=False)
        >>> trainer.train_model({"epochs": 2}, (torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)))
        >>> trainer.updates
        2
    """

    _has_defaults = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, _INSTEAD)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The same callbacks in a list that also has plato's method names.
        self.context.callbacks = CallbackHandler(self.context.callbacks)
        hooks = _own_hooks(self)
        if hooks is not None:
            # plato calls the trainer's own method before its callbacks.
            self.context.callbacks.add(hooks, first=True)
        if self._train_step is None and not self._is_default("perform_forward_and_backward_passes"):
            # Only if overridden: otherwise the loop's own step, which supports more, is used.
            self._train_step = _whole_step

    def train_run_start(self, config: Mapping[str, Any]) -> None:
        """Called before the first batch of a run."""

    def train_run_end(self, config: Mapping[str, Any]) -> None:
        """Called after the last batch of a run."""

    def train_epoch_start(self, config: Mapping[str, Any]) -> None:
        """Called before the first batch of an epoch."""

    def train_epoch_end(self, config: Mapping[str, Any]) -> None:
        """Called after an epoch."""

    def train_step_start(self, config: Mapping[str, Any], batch: Any = None) -> None:
        """Called before a batch, with its index in the epoch."""

    def train_step_end(self, config: Mapping[str, Any], batch: Any = None, loss: Any = None) -> None:
        """Called after an update, with the index of its last batch and its detached loss."""

    def perform_forward_and_backward_passes(self, config: Mapping[str, Any], examples: Any, labels: Any) -> Any:
        """Make the whole step of a batch, optimizer included, and return the loss; called only if overridden."""
        loss = self.criterion(self.model(examples), labels)
        self.context.backward(loss)
        self.context.step()
        return loss

    @property
    def _loss_criterion(self) -> Any:
        """The loss, by the name that steps written for plato use."""
        return self.criterion

    def process_outputs(self, outputs: Any) -> Any:
        """Return the outputs that the loss and the metrics of a test receive, given the outputs of the model."""
        return outputs

    def _process_outputs(self, outputs: Any) -> Any:
        return self.process_outputs(outputs)

    def train_model(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> None:
        """Start a new run over `trainset`: `config["epochs"]` epochs with batches of `config["batch_size"]`."""
        fit_new_run(self, trainset, sampler, config)

    def test_model(self, config: Mapping[str, Any], testset: Any, sampler: Any = None) -> float:
        """Return the result of the testing strategy on `testset`; without one the accuracy, or else the loss."""
        return accuracy_on(self, testset, sampler, config)

    def test(self, testset: Any = None, sampler: Any = None) -> float:
        """Return the accuracy on `testset`, by default on the option `test_dataset`."""
        if testset is None:
            testset = self.context.run.data.get("test")
        if testset is None:
            raise DataError("no test data: pass it to the call, or test_dataset=… to the trainer")
        return self.test_model({}, testset, sampler)

    def _train_here(self, trainset: Any, sampler: Any) -> float:
        # An override of `train_model` replaces the whole training, so `train` must call it.
        if trainset is None or self._is_default("train_model"):
            return super()._train_here(trainset, sampler)
        started = time.perf_counter()
        self.train_model(dict(self.context.config), trainset, sampler)
        return time.perf_counter() - started

    def save_model(self, filename: str | Path | None = None, location: str | Path | None = None) -> Path:
        """Write the weights alone, and return the path.

        Args:
            filename: The name of the file, or its path; by default `model.pth`.
            location: The folder; by default the current one for a given `filename`, else the `checkpoint_dir`.
        """
        return super().save_model(self._model_path(filename, location))

    def load_model(  # type: ignore[override]  # plato's second argument is the folder
        self, filename: str | Path | None = None, location: str | Path | None = None, *, strict: bool = True
    ) -> None:
        """Load weights that `save_model` wrote under the same name, or the weights of a checkpoint."""
        super().load_model(self._model_path(filename, location), strict=strict)

    def _model_path(self, filename: str | Path | None, location: str | Path | None) -> Path:
        if location is None:
            location = self.options.checkpoint_dir if filename is None else ""
        return Path(location) / (filename or "model.pth")

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor of zeros."""
        return torch.zeros(shape)

    def set_client_id(self, client_id: int) -> None:
        """Set the client that this trainer works for; 0 is the server."""
        self.context.client_id = client_id

    @property
    def client_id(self) -> int:
        """The client this trainer works for."""
        return self.context.client_id

    @property
    def current_round(self) -> int:
        """The round of the federation that this trainer works in; 0 if there is none."""
        return self.context.current_round

    @current_round.setter
    def current_round(self, number: int) -> None:
        self.context.current_round = number

    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks, with plato's methods."""
        return cast(CallbackHandler, self.context.callbacks)

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler of the first optimizer; None for a constant rate, and before the first run."""
        return self.context.schedulers[0].scheduler if self.context.schedulers else None

    @property
    def train_loader(self) -> Any:
        """The training batches."""
        return self._loader("train")

    @property
    def sampler(self) -> Any:
        """The sampler of the last `train` or `train_model`; an assigned one is for the next `fit`."""
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self._sampler = sampler

    @property
    def run_history(self) -> History:
        """The history, by plato's name."""
        return self.context.history

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, else the last one that ran, counted from 1; 1 before the first."""
        return self.context.current_epoch


def _own_hooks(trainer: Trainer) -> Callback | None:
    """Return a callback that calls the hook methods which a trainer's class overrides, or None if there are none."""
    events: dict[str, Any] = {}
    # Held weakly: the trainer holds its context, which holds this.
    reference = weakref.ref(trainer)

    def owner() -> Trainer:
        alive = reference()
        assert alive is not None, "hooks are called by the trainer that they belong to"
        return alive

    # Only overridden hooks are added: an event without callbacks costs nothing in the loop.
    if trainer._customized_by("train_run_start"):
        events["on_train_start"] = lambda self, context: owner().train_run_start(context.config)
    if trainer._customized_by("train_run_end"):
        events["on_train_end"] = lambda self, context: owner().train_run_end(context.config)
    if trainer._customized_by("train_epoch_start"):
        events["on_epoch_start"] = lambda self, context: owner().train_epoch_start(context.config)
    if trainer._customized_by("train_epoch_end"):
        events["on_epoch_end"] = lambda self, context, metrics: owner().train_epoch_end(context.config)
    if trainer._customized_by("train_step_start"):
        events["on_step_start"] = lambda self, context, batch: owner().train_step_start(
            context.config, context.progress.batch
        )
    if trainer._customized_by("train_step_end"):

        def on_step_end(self: Callback, context: TrainingContext, output: Mapping[str, Any]) -> None:
            # plato's step ends with an update, so batches inside of an accumulation window do not count.
            if context.run.window.closes:
                owner().train_step_end(context.config, context.progress.batch - 1, output["loss"].detach())

        events["on_step_end"] = on_step_end
    if not events:
        return None
    # pickle finds no class that a function builds, so the callback is pickled as the call that builds it.
    events["__reduce__"] = lambda self: (_own_hooks, (owner(),))
    hooks: Callback = type("OwnHooks", (Callback,), {**events, "is_part_of_trainer": True})()
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
    if "training_step" in trainer.strategies.given:
        raise ConfigError(
            "perform_forward_and_backward_passes makes its updates itself, so training_step_strategy would have no "
            "effect; give one or the other"
        )
    # The method called `loss.backward()` and `optimizer.step()` directly, which the loop cannot see.
    count_own_update(context, "perform_forward_and_backward_passes")
    return {"loss": loss}
