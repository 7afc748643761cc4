"""plato's names: hooks as methods, `train_model`, `test_model`, `test`, client ids, and the composable trainer."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dovetail import checkpoint as store
from dovetail.callbacks import Callback
from dovetail.data import split_batch
from dovetail.errors import CheckpointError, ConfigError, DataError
from dovetail.history import History
from dovetail.overrides import reject_lost_overrides
from dovetail.trainers import trainer as main
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.processes import train_in_process
from dovetail.trainers.recipe import CONFLICTS, SPELLINGS
from dovetail.trainers.reuse import fit_anew
from dovetail.trainers.strategies import (
    DefaultDataLoaderStrategy,
    DefaultLossCriterionStrategy,
    DefaultOptimizerStrategy,
    DefaultTestingStrategy,
    DefaultTrainingStepStrategy,
    NoOpUpdateStrategy,
    NoSchedulerStrategy,
)
from dovetail.trainers.testing import accuracy_on

__all__ = ["ComposableTrainer", "Trainer"]

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
        >>> trainer = Counting(nn.Linear(4, 2), verbose=False)
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
        hooks = _own_hooks(self)
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

    def process_outputs(self, outputs: Any) -> Any:
        """Return the outputs that the loss and the metrics of a test receive, given those of the model."""
        return outputs

    def _process_outputs(self, outputs: Any) -> Any:
        return self.process_outputs(outputs)

    def train_model(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> None:
        """Start a new run over `trainset`: `config["epochs"]` epochs with batches of `config["batch_size"]`."""
        fit_anew(self, trainset, sampler, config)

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
        if trainset is None or self._is_default("train_model"):
            return super()._train_here(trainset, sampler)
        started = time.perf_counter()
        self.train_model(dict(self.context.config), trainset, sampler)
        return time.perf_counter() - started

    def set_client_id(self, client_id: int) -> None:
        """Set the client that this trainer works for; 0 is the server."""
        self.context.client_id = client_id

    @property
    def client_id(self) -> int:
        """The client this trainer works for."""
        return self.context.client_id

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


class ComposableTrainer(Trainer):
    """A trainer whose every concern is a strategy that can be replaced alone.

    Every strategy has a default: cross entropy, SGD, a plain step, a constant rate, no update rule, data in the given
    order, accuracy. A strategy may be an instance, a class, a plain callable or torch object (`F.cross_entropy`,
    `partial(AdamW, lr=1e-3)`), or a name (`"AdamW"`); steps and updates may be lists, which are composed.

    Strategies are set up when the trainer is made, hear `on_train_start` in every run, and are torn down once: by
    `close()`, at the end of a `with` block, or when the trainer is no more.

    With `max_concurrency=n`, `train` and `obtain_model_update` work in a spawned process, at most n of which run at
    once, and the trainer ends as if it had trained itself; see `dovetail.trainers.processes.train_in_process`.

    Args:
        model: A module, or a class or function that makes one.
        callbacks: Callbacks, as instances or classes.
        loss_strategy: What the loss is.
        optimizer_strategy: Which optimizer moves the parameters.
        training_step_strategy: How one batch is computed.
        lr_scheduler_strategy: How the learning rate moves.
        model_update_strategy: Hooks around updates, and the payload that a client sends besides its weights.
        data_loader_strategy: How a training set becomes batches.
        testing_strategy: How a model is judged by `test`.
        options: The other arguments and options of `dovetail.Trainer`.

    Example:
        >>> from dovetail import Epochs
        >>> from dovetail.trainers.strategies import AdamOptimizerStrategy
        >>> x = torch.randn(64, 4); y = (x.sum(dim=1) > 0).long()
        >>> trainer = ComposableTrainer(
        ...     model=torch.nn.Linear(4, 2), optimizer_strategy=AdamOptimizerStrategy(lr=0.1), verbose=False
        ... )
        >>> history = trainer.fit((x, y), max_length=Epochs(20))
        >>> trainer.test((x, y)) > 0.9
        True
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        callbacks: Iterable[Any] | None = None,
        loss_strategy: Any = None,
        optimizer_strategy: Any = None,
        training_step_strategy: Any = None,
        lr_scheduler_strategy: Any = None,
        model_update_strategy: Any = None,
        data_loader_strategy: Any = None,
        testing_strategy: Any = None,
        **options: Any,
    ) -> None:
        def default(role: str, strategy: Any, make: Callable[[], Any]) -> Any:
            # An option such as `optim_function` is an answer, too: no default takes its place.
            named = {SPELLINGS.get(name, name) for name in options}
            is_answered = strategy is not None or CONFLICTS.get(role, frozenset()) & named
            return strategy if is_answered else make()

        super().__init__(
            model,
            callbacks=callbacks,
            loss_strategy=default("loss", loss_strategy, DefaultLossCriterionStrategy),
            optimizer_strategy=default("optimizer", optimizer_strategy, DefaultOptimizerStrategy),
            training_step_strategy=default("training_step", training_step_strategy, DefaultTrainingStepStrategy),
            lr_scheduler_strategy=default("lr_scheduler", lr_scheduler_strategy, NoSchedulerStrategy),
            model_update_strategy=default("model_update", model_update_strategy, NoOpUpdateStrategy),
            data_loader_strategy=default("data_loader", data_loader_strategy, DefaultDataLoaderStrategy),
            testing_strategy=default("testing", testing_strategy, DefaultTestingStrategy),
            **options,
        )
        self._payload: tuple[tuple[str, int], dict[str, Any]] | None = None

    def obtain_model_update(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> dict[str, Any]:
        """Start a new run on `trainset`, and return the update that a client sends.

        Returns:
            A copy of the model's state, or `{"model_update": state, **payload}` if the strategy has a payload.
        """
        if self.options.max_concurrency is None:
            self.train_model(config, trainset, sampler)
        else:
            self._train_elsewhere(trainset, sampler, config)
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        payload = self.update_payload
        return {"model_update": state, **payload} if payload else state

    def obtain_model_at_time(self, client_id: int, requested_time: datetime) -> dict[str, Any]:
        """Return the model of a client's newest checkpoint that was written at a time or before.

        Args:
            client_id: The client; its checkpoints lie in this trainer's `checkpoint_dir`.
            requested_time: A time with its zone.

        Raises:
            CheckpointError: There is none.
            ConfigError: The time has no zone.
        """
        if requested_time.tzinfo is None:
            raise ConfigError(f"requested_time: expected a time with its zone, got {requested_time!r}")
        folder = Path(self.options.checkpoint_dir)
        before = [
            info
            for info in store.list_checkpoints(folder)
            if info.summary.get("client_id") == client_id and info.created <= requested_time
        ]
        if not before:
            raise CheckpointError(f"{folder} holds no checkpoint of client {client_id} from {requested_time} or before")
        model: dict[str, Any] = store.load(max(before, key=lambda info: info.created).path)["model"]
        return model

    @property
    def update_payload(self) -> dict[str, Any]:
        """The payload of the update strategy; after training in a process, the payload that it had there."""
        if self._payload is not None and self._payload[0] == self._moment():
            return dict(self._payload[1])
        return self.strategies.model_update.get_update_payload(self.context)

    def _train_elsewhere(self, trainset: Any, sampler: Any, config: Mapping[str, Any] | None = None) -> float:
        seconds, payload = train_in_process(self, trainset, sampler, config)
        self._payload = (self._moment(), payload)
        return seconds

    def _moment(self) -> tuple[str, int]:
        return self.context.run.id, self.context.progress.batches


def _own_hooks(trainer: Trainer) -> Callback | None:
    """Return a callback that calls the hook methods which a trainer's class overrides, or None if there are none."""
    events: dict[str, Any] = {}
    # Held weakly: the trainer holds its context, which holds this.
    reference = weakref.ref(trainer)

    def owner() -> Trainer:
        alive = reference()
        assert alive is not None, "hooks are called by the trainer that they belong to"
        return alive

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
            if context.run.window.closes:
                owner().train_step_end(context.config, context.progress.batch - 1, output["loss"].detach())

        events["on_step_end"] = on_step_end
    if not events:
        return None
    # pickle finds no class that a function builds, so the callback is pickled as the call that builds it.
    events["__reduce__"] = lambda self: (_own_hooks, (owner(),))
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
