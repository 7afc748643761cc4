"""Single-process trainer: all verbs of the loop, and further methods that subclasses override."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.data import as_loader
from dovetail.errors import CheckpointError, ConfigError, DataError, add_note
from dovetail.history import History
from dovetail.trainers import base, loop
from dovetail.trainers.attributes import (
    CALLBACK_OPTIONS,
    OptionAssignment,
    clipping_of,
    frozen_base,
    warn_of_near_names,
)
from dovetail.trainers.bound_scheduler import step_schedulers
from dovetail.trainers.catalog import classifies, is_torch_loss
from dovetail.trainers.context import Plan, Stage, TrainingContext, Window, stop_deferring
from dovetail.trainers.data_handling import TrainerData
from dovetail.trainers.device_copies import Move, batch_mover, copier_ahead
from dovetail.trainers.devices import as_device, place_model
from dovetail.trainers.diagnosis import as_output, explain_failure, no_targets
from dovetail.trainers.export import ExportFormat, export_model
from dovetail.trainers.loaders import form_loader, source_of
from dovetail.trainers.metrics import Meter, as_metrics
from dovetail.trainers.modules import as_module, forward
from dovetail.trainers.named_batches import NamedBatch, named_batch, predictions_of
from dovetail.trainers.optimization import Optimization
from dovetail.trainers.options import as_mode
from dovetail.trainers.own_steps import reject_two_steps, watch_step
from dovetail.trainers.planning import make_plan
from dovetail.trainers.randomness import seed_everything
from dovetail.trainers.recipe import SPELLINGS, check_owned, has_default_loss, make_strategies, options_from
from dovetail.trainers.run_metrics import prepare_run_metrics
from dovetail.trainers.snapshot import load_weights, restore_state, save_weights, take_state
from dovetail.trainers.stepping import make_update
from dovetail.trainers.strategies.training_step import is_plain
from dovetail.trainers.strategies.weighting import WeightedLoss, batch_splitter, find_weighted, weighted_output
from dovetail.units import TrainUnit

_T = TypeVar("_T", bound="SingleProcessTrainer")

StepFunction = Callable[[Any, Any], Mapping[str, Any] | Tensor]


class SingleProcessTrainer(base.Trainer, OptionAssignment):
    """Implements every verb of the loop for one model in one process, and further methods for subclasses to override.

    It has the same arguments as `Trainer`.
    """

    _has_defaults = True
    _weighted: WeightedLoss | None = None

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        device: str | int | torch.device | Sequence[Any] | None = None,
        mode: Literal["train", "test"] = "train",
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        criterion: Any = None,
        callbacks: Iterable[Any] | None = None,
        metrics: Any = None,
        train_step: StepFunction | None = None,
        test_step: StepFunction | None = None,
        loss_strategy: Any = None,
        optimizer_strategy: Any = None,
        training_step_strategy: Any = None,
        lr_scheduler_strategy: Any = None,
        model_update_strategy: Any = None,
        data_loader_strategy: Any = None,
        testing_strategy: Any = None,
        **options: Any,
    ) -> None:
        self._saves_by_default = False
        spelled = {"criterion": criterion, "optimizer": optimizer, "scheduler": scheduler}
        written = {*options, *(name for name, piece in spelled.items() if piece is not None)}
        self.options = options_from(options, spelled, _CONSTRUCTOR_NAMES).bound_to(self)
        # The names of options, for any spelling in the call.
        self._given = frozenset(SPELLINGS.get(name, name) for name in written)
        self._optimization = Optimization()
        # Runs may be many and short: attribute names are checked only after an attribute was added.
        self._num_attributes = 0
        if self.options.seed is not None and not isinstance(model, nn.Module):
            # Seed before the model is built, so that its initial weights are reproducible.
            seed_everything(self.options.seed)
        own_device = as_device(device, self.options.device_id if "device_id" in options else None)
        self.context = context = TrainingContext(as_module(model), own_device)
        context.run.window, context.run.base = Window(self.options.accumulation_steps), frozen_base(self.options)
        context.run.data = self.options.datasets
        context.config = {"epochs": self.options.num_epochs, "batch_size": self.options.batch_size}
        if "learning_rate" in options:
            context.config["lr"] = self.options.learning_rate
        # `configure` starts from these values for every run.
        self._own_config = dict(context.config)
        context.run.metrics = as_metrics(metrics)
        self._mode = as_mode(mode)
        self.criterion: Any = None
        self._sampler: Any = None
        context.run.metrics_are_default = metrics is None
        self._train_step = train_step
        self._test_step = test_step
        self._move: Move = batch_mover(self.options.memory_format, torch.device("cpu"))
        self._split = batch_splitter(self.options, context)
        self._clipping = clipping_of(self.options)
        self._data = TrainerData(context, self.options.batch_limits)
        self._placed: weakref.ref[nn.Module] | None = None
        given = {
            "loss": loss_strategy,
            "optimizer": optimizer_strategy,
            "training_step": training_step_strategy,
            "lr_scheduler": lr_scheduler_strategy,
            "model_update": model_update_strategy,
            "data_loader": data_loader_strategy,
            "testing": testing_strategy,
        }
        self.strategies = strategies = make_strategies(given, self.options, written)
        reject_two_steps(self, strategies.training_step)
        # Whether a subclass overrides the loss: looked up once, because many short runs need it.
        self._has_own_loss = not self._is_default("get_loss_criterion")
        if not self._has_own_loss:
            if "loss" not in strategies.given and self._steps_by_default:
                check_owned(self.options.optim_function, context.model, self.options.loss_function)
            context.run.loss_is_default = has_default_loss(strategies, self._given)
        if isinstance(callbacks, str) or not isinstance(callbacks, Iterable | None):
            raise ConfigError(f"callbacks: expected a list of callbacks, got {callbacks!r}")
        seed = self.options.seed
        # Without a seed it is torch's own; checkpoints contain it, so that a resumed run has the same order.
        context.state["order_seed"] = torch.initial_seed() % 2**63 if seed is None else seed
        self._setup_strategies()
        self._follow_strategies()
        hooks = self._strategy_hooks
        # Strategies change the computation, so they come before callbacks that only observe it.
        context.callbacks.add(*([] if hooks is None else [hooks]), *(callbacks or ()))
        self._own_callbacks = {}
        self._renew_callbacks(*CALLBACK_OPTIONS)

    @property
    def core(self) -> SingleProcessTrainer:
        """The innermost trainer: this one, unless it decorates another trainer."""
        return self

    # ------------------------------------------------------------------ methods to override, besides the verbs

    def get_loss_criterion(self) -> Callable[[Any, Any], Tensor]:
        """Return the loss: a callable of outputs and targets."""
        return self.strategies.loss.criterion(self.context)

    def get_optimizer(self, model: nn.Module) -> Optimizer | Sequence[Optimizer]:
        """Return the optimizer of a model, or several in the order in which the loop steps them."""
        return self.strategies.optimizer.create_optimizer(model, self.context)

    def get_lr_scheduler(self, config: Mapping[str, Any], optimizer: Optimizer) -> Any:
        """Return the scheduler of an optimizer, or None; called once for each optimizer.

        A returned list of `BoundScheduler` is for all optimizers: the trainer then does not call this again.
        """
        return self.strategies.lr_scheduler.create_scheduler(optimizer, self.context)

    def get_train_loader(self, batch_size: int, trainset: Any, sampler: Any = None) -> Iterable[Any]:
        """Return the training batches of a dataset; not called for data that is already in batches."""
        return self.strategies.data_loader.create_train_loader(trainset, sampler, batch_size, self.context)

    def get_test_loader(self, batch_size: int, testset: Any, sampler: Any = None) -> Iterable[Any]:
        """Return the batches of validation, test or prediction: every sample once, in order."""
        return as_loader(
            testset,
            batch_size=batch_size,
            num_workers=self.options.num_workers,
            sampler=sampler,
            seed=self.context.state["order_seed"],
            collate_fn=self.options.collate_fn,
        )

    # ------------------------------------------------------------------ verbs, in the order of the loop

    def plan(self, **requested: TrainUnit | Mapping[str, int] | None) -> Plan:
        """Return the plan of a `fit`: its arguments, completed by the options."""
        return make_plan(
            self.context,
            self.strategies,
            self.options,
            self._given,
            requested,
            validates=source_of(self, "valid") is not None or not self._is_default("val_epoch"),
            saves_by_default=self._saves_by_default,
        )

    def setup(self) -> None:
        """Seed a new run, place the model, build the criterion and, for training, optimizers and schedulers."""
        context, model = self.context, self._given_model()
        is_fresh = context.progress.batches == 0
        if context.stage == "train" and is_fresh and self.options.seed is not None:
            seed_everything(self.options.seed)
        self._place_model(model)
        if context.device.type != "cpu":
            # Now, because a layer may have chosen another device.
            self._move = batch_mover(self.options.memory_format, context.device)
        if context.stage == "train" and context.precision is not None:
            context.precision.start_run(is_new_run=is_fresh)
        if self.criterion is None:
            self.criterion = self.get_loss_criterion()
        has_weights = self.options.class_weight is not None or self.options.sample_weight
        if has_weights or self._weighted is not None:
            self._weighted = find_weighted(self.strategies.loss, self.options) if has_weights else None
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(context.device)
        prepare_run_metrics(self)
        if not self.strategies.is_set_up:
            raise ConfigError("the trainer is closed: its strategies are torn down; make a new one")
        if context.stage == "train":
            self._optimization.build_later(self)
            if len(vars(self)) != self._num_attributes:
                self._num_attributes = len(vars(self))
                warn_of_near_names([name for name in vars(self) if name[0] != "_" and not hasattr(type(self), name)])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; a state of another model is rejected before any change."""
        context, options = self.context, self.options
        if options.device_map is not None:
            context.device = as_device(options.device_map)
        self._place_model(self._given_model())
        self._optimization.build(self)
        restore_state(context, self.strategies, self._data, state, options.memory_format)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizers, schedulers, counters, history, callbacks, RNG and the position in the data."""
        self._given_model()
        # Otherwise a checkpoint of a trainer that has not trained yet would lack the optimizer.
        self._optimization.build(self)
        return take_state(self.context, self.strategies, self._data)

    def teardown(self, error: BaseException | None) -> None:
        """Wait for a checkpoint that is being written in the background."""
        if self.context._deferred is not None:
            stop_deferring(self.context)
        saver = self.context.run.saver
        if saver is None or saver.writer is None:
            return
        writer, saver.writer = saver.writer, None
        try:
            writer.close()
        except CheckpointError as failure:
            if error is None:
                raise
            add_note(error, f"besides, {failure}")

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the batches of a stage; in training, the rest of the running epoch from `progress.batch`."""
        reads_ahead = stage == "train" and self.context.run.window.size > 1 and self.num_batches(stage) is None
        return self._data.batches(stage, self._loader(stage), reads_ahead=reads_ahead, copier=copier_ahead(self, stage))

    def num_batches(self, stage: Stage) -> int | None:
        """Return the steps of a pass, counted over all processes of the run, or None if the data has no length."""
        return self._data.num_batches(stage, self._loader(stage))

    def train_epoch(self) -> Mapping[str, float] | None:
        """Run one pass over the training data. An override may return its mean metrics."""
        return loop.train_epoch(self.context)

    def val_epoch(self) -> Mapping[str, float] | None:
        """Run one validation pass; without data it returns no metrics. An override may be `pass`."""
        # The plan has a validation if this is overridden: the override may have its own data, or measure nothing.
        return {} if source_of(self, "valid") is None else loop.val_epoch(self.context)

    def reduce(self, meter: Meter) -> Meter:
        """Return the meter unchanged: there is only one process."""
        return meter

    def to_device(self, batch: Any) -> Any:
        """Move every tensor of a batch to the trainer's device."""
        return self._move(batch, self.context.device)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the loss of the model on a batch of inputs and targets."""
        if self._train_step is not None:
            return as_output(self._train_step(self, batch))
        context, criterion = self.context, self.criterion
        state, model, optimizers = context.state, context.model, context.optimizers
        if self._shares_steps:
            state["current_batch"] = context.progress.batch
        context.run.batch.uses_criterion = self._step_is_plain
        named = None if type(batch) in _PAIRS else self._named(batch)
        if named is not None:
            inputs, targets, criterion = named.inputs, named.targets, named.loss
        else:
            inputs, targets = self._split(batch)
            if targets is None and self._step_is_plain and is_torch_loss(criterion):
                raise DataError(no_targets(context, _NEED_TARGETS))
        optimizer = optimizers[0] if optimizers else None
        try:
            loss = self._step_strategy.training_step(model, optimizer, inputs, targets, criterion, context)
        except (TypeError, RuntimeError) as error:
            explain_failure(error, context, inputs, targets)
            raise
        if self._shares_steps:
            state["last_loss"] = loss.detach()
        if named is not None:
            return named.train_output(loss)
        return {"loss": loss} if self._weighted is None else {"loss": loss, "num_items": self._weighted.num_items}

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Return loss, outputs and targets of a batch; metrics are computed from the latter two."""
        if self._test_step is not None:
            return as_output(self._test_step(self, batch))
        self.context.run.batch.uses_criterion = True
        named = None if type(batch) in _PAIRS else self._named(batch)
        inputs, targets = self._split(batch) if named is None else (named.inputs, named.targets)
        if targets is None and named is None:
            raise DataError(f"the batch has no targets: {_NEED_TARGETS}")
        outputs = self._process_outputs(forward(self.context.model, inputs))
        if named is not None:
            return named.test_output(outputs)
        loss = self.criterion(outputs, targets)
        if self._weighted is not None:
            return weighted_output(loss, self._weighted, outputs, targets)
        return {"loss": loss, "output": outputs, "target": targets}

    def predict_step(self, batch: Any) -> Any:
        """Return the model's outputs for the inputs of a batch."""
        named = self._named(batch)
        if named is not None:
            return predictions_of(self._process_outputs(forward(self.context.model, named.inputs)))
        inputs = self._split(batch)[0]
        if isinstance(inputs, Mapping) and len(inputs) == 1:
            # As in training, where a dictionary with one input besides the target is passed by position.
            (inputs,) = inputs.values()
        return self._process_outputs(forward(self.context.model, inputs))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of the loss."""
        precision = self.context.precision
        if precision is not None:
            loss = precision.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch has no types for it

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip the norm of an optimizer's gradients to the option `gradient_clip`."""
        if self.context.precision is not None:
            self.context.precision.unscale(optimizer)
        if self._clipping is not None:
            self.context.run.batch.gradient_norm = self._clipping.apply(optimizer)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer and return whether it made a real step; only a gradient scaler skips one."""
        if self.context.precision is not None:
            return self.context.precision.step(optimizer)
        if self.context.run.needs_closure:
            optimizer.step(self.context.run.closure)
        else:
            make_update(optimizer)
        return True

    def scheduler_step(self, interval: str, metrics: Mapping[str, float] | None = None) -> None:
        """Advance the schedulers of an interval; schedulers that count batches catch up at updates."""
        # The loop calls this at every update, and most runs have no scheduler.
        if self.context.schedulers:
            step_schedulers(self.context, interval, metrics)

    def after_step(self, output: Mapping[str, Any]) -> None:
        """Update the loss scale of mixed precision."""
        if self.context.precision is not None:
            self.context.precision.update()

    # ------------------------------------------------------------------ attributes under their common names

    @property
    def model(self) -> Any:
        """The module that is trained."""
        return self.context.model

    @model.setter
    def model(self, model: Any) -> None:
        self.context.model = as_module(model)
        self.context.optimizers.clear()
        self.context.schedulers.clear()

    @property
    def optimizer(self) -> Optimizer | None:
        """The first optimizer, built on first access; None without a model."""
        if not self.context.optimizers and self.context.model is not None:
            self._optimization.build(self)
        return next(iter(self.context.optimizers), None)

    @property
    def device(self) -> torch.device:
        """The device of the model and of the batches that steps receive."""
        return self.context.device

    @property
    def history(self) -> History:
        """The record of all runs of this trainer."""
        return self.context.history

    def save_model(self, path: str | Path) -> Path:
        """Write the weights alone: as safetensors, or by `torch.save` for `.ckpt`, `.pt`, `.pth` and `.bin`.

        In a run of several processes all of them call this, and the first one writes.

        Raises:
            UnknownNameError: The name ends in another suffix, such as `.onnx`.
        """
        return save_weights(self._given_model(), path, is_main=self.context.process.is_main)

    def export(self, path: str | Path, format: ExportFormat | None = None, *, example: Any = None) -> Path:
        """Write the model as "safetensors", "torch.export", "onnx" or "huggingface"; see `export_model`."""
        return export_model(self, path, format, example)

    def load_model(self, path: str | Path, strict: bool = True) -> None:
        """Load weights that `save_model` wrote, or only the weights of a checkpoint."""
        load_weights(self._given_model(), path, strict=strict)

    def _loader(self, stage: Stage) -> Any:
        """Return the loader of a stage; it is built once for the data of the stage."""
        run, data = self.context.run, self._data
        known, loader = data.loaders.get(data.key(stage) if run.data_set else stage, (None, None))
        if known is None or known is not (run.data.get(stage) if stage == "train" else source_of(self, stage)):
            return form_loader(self, data, stage)
        return loader

    def close(self) -> None:
        """Tear down the strategies. The trainer cannot train afterwards."""
        self._teardown_strategies()

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy builds these itself in its next run.
        rebuilt = {} if self._has_own_loss else {"criterion": None}
        copied = {name: value for name, value in self.__dict__.items() if name != "_closing"}
        return {**copied, **rebuilt, "_placed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, options=state["options"].bound_to(self))
        # Only the trainer that set the strategies up tears them down, not a copy.
        self._closing = weakref.finalize(self, self.strategies.teardown, self.context)
        self._closing.detach()

    # ------------------------------------------------------------------ private

    def _setup_strategies(self) -> None:
        """Set up every strategy. The constructor calls this."""
        self.strategies.setup(self.context)

    def _teardown_strategies(self) -> None:
        """Tear down every strategy; later calls do nothing. `close` calls this."""
        self._closing()

    def _process_outputs(self, outputs: Any) -> Any:
        """Return the outputs that the loss and the metrics of a test receive."""
        return outputs

    def _batch_size(self, stage: Stage) -> int:
        """Return the batch size of a stage; the configuration of a run may override the option."""
        options, size = self.options, int(self.context.config["batch_size"])
        if stage == "train":
            return size
        return (0 if stage == "valid" else options.test_batch_size) or options.val_batch_size or size

    @property
    def _steps_by_default(self) -> bool:
        return self._train_step is None and self._is_default("train_step")

    @property
    def _tests_by_default(self) -> bool:
        return self._test_step is None and self._is_default("test_step")

    def _is_default(self, name: str) -> bool:
        """Return whether no subclass or add-on overrides a method of this trainer; layers do not count."""
        return not self.core._customized_by(name)

    def _given_model(self) -> nn.Module:
        if self.context.model is None:
            raise ConfigError("the trainer has no model: give it one, Trainer(model, …)")
        return self.context.model

    def _named(self, batch: Any) -> NamedBatch | None:
        """Return a batch of named values, prepared for the model; None for other batches, and for weighted losses."""
        # A weighted loss is a function of outputs, targets and weights, so the model cannot compute it.
        if self._weighted is not None:
            return None
        return named_batch(self.context, self.criterion, batch, self.options.target)

    def _place_model(self, model: nn.Module) -> None:
        self._placed = place_model(model, self.context.device, self.options.memory_format, self._placed)

    def _follow_strategies(self) -> None:
        self._closing = weakref.finalize(self.core, self.strategies.teardown, self.context)
        self._strategy_hooks = self.strategies.as_callback()
        # The optimizer of a step is None if a subclass builds none.
        self._step_strategy: Any = watch_step(self.strategies.training_step)
        self._step_is_plain = is_plain(self.strategies.training_step)
        # Only strategies read the batch number and the last loss, and storing them slows a tiny step by some percent.
        self._shares_steps = bool(self.strategies.given)

    def _classifies(self) -> bool:
        return classifies(self.criterion) if self._has_own_loss else self.strategies.loss.classifies(self.context)


_CONSTRUCTOR_NAMES = tuple(inspect.signature(SingleProcessTrainer.__init__).parameters)[1:-1]
# Batches without names, of which nearly all are.
_PAIRS = (list, tuple)
_NEED_TARGETS = "give pairs (inputs, targets), or a train_step and test_step that need none"
