"""Compiled training steps for any trainer: one graph per step, or a compiled module."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from dovetail.errors import ConfigError
from dovetail.trainers.base import Trainer
from dovetail.trainers.capabilities.compile_limits import (
    NoCounters,
    full_precision,
    graph_obstacle,
    has_own_step_function,
    own_verb,
    single_step_reason,
    split_reason,
    trained_by,
)
from dovetail.trainers.capabilities.compile_module import compile_module
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.capabilities.data_parallel import DataParallel
from dovetail.trainers.capabilities.timed import Timed
from dovetail.trainers.context import Stage
from dovetail.trainers.fitting import check_kind
from dovetail.trainers.preserve_state import layers, with_parts
from dovetail.trainers.strategies.loss_criterion import (
    BCEWithLogitsLossStrategy,
    CrossEntropyLossStrategy,
    DefaultLossCriterionStrategy,
    MSELossStrategy,
    NLLLossStrategy,
)
from dovetail.trainers.strategies.training_step import DefaultTrainingStepStrategy
from dovetail.trainers.whole_step import (
    SHARP,
    Backend,
    CannotCompileError,
    GradientBuffers,
    Outputs,
    UnknownError,
    UpdateStep,
    WholeStep,
    attribute_spaces,
    check_compiler,
    read_by,
    variable_spaces,
)
from dovetail.units import Epochs, Progress, Tokens, TrainUnit


class Compiled(Capability):
    """Trains with one compiled graph per step, or with a compiled module.

    Mode `step` traces `train_step` once per form of a batch (shapes and types), and compiles forward, backward,
    clipping and the optimizer's update into one graph. Mode `model` is `torch.compile` of the module. Hooks, schedules,
    checkpoints, counters and the optimizer's state do not change. If a step cannot be compiled, training continues
    eagerly, and one warning gives the reason.

    If gradients are needed outside of the graph (accumulation, several processes or optimizers, float16, hooks for
    gradients), one graph computes them, and a second one makes the update. Otherwise gradients exist only inside the
    graph: `parameter.grad` is None after a compiled step.

    Args:
        mode: `step` or `model`. An add-on also accepts the trainer's modes, `train` and `test`, and forwards them.
        backend: `inductor` compiles the graph; `eager` calls its operations one by one, which shows whether a
            difference comes from the trace or from the compiler, and needs no C++ compiler.
        steps_per_call: Steps that one call of a graph makes, in mode `step`. Counters, history, reports and checkpoints
            are the same, batch by batch; validation, checkpoints and stops wait for the end of a call. A call ends
            at the end of an epoch, a length or a period. If a hook needs every step, each call makes one step.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(Compiled)(nn.Linear(4, 2), "cpu", mode="step", verbose=False)
        >>> trainer.graphs
        0
    """

    kind = "compilation"

    _compiles: str
    _backend: Backend
    _steps_per_call: int
    # Batches of the call that starts with the running batch, and outputs of a call for the batches that follow.
    _waiting: list[Any]
    _coming: deque[Outputs]
    _step: WholeStep | None
    # If gradients leave the graph: their buffers, and the graphs of the optimizers' updates.
    _buffers: GradientBuffers | None
    _updates: dict[int, UpdateStep]
    # True if the graph makes the update, in full precision.
    _is_plain: bool
    # The properties of the run for which the step was built.
    _built_for: Any
    _restored: Mapping[str, Any] | None
    # The epoch of the last check of all parts; None at the start of a run.
    _epoch: int | None
    # The reasons against a graph and against several steps per call; None if not determined yet.
    _causes: tuple[str | None, str | None] | None
    _is_eager: bool
    # True if each call makes only one step, although more were requested.
    _is_one_by_one: bool
    # Removes compiled functions from a model at the end of the run.
    _undo: Callable[[], None] | None
    # Warnings that were already given.
    _warned: set[str]

    def __init__(
        self,
        *args: Any,
        mode: Literal["model", "step", "train", "test"] = "step",
        backend: Backend = "inductor",
        steps_per_call: int = 1,
        **kwargs: Any,
    ) -> None:
        if mode in ("train", "test"):
            mode, kwargs["mode"] = "step", mode
        if mode not in ("model", "step"):
            raise ConfigError(f"mode: expected 'model' or 'step', got {mode!r}")
        if isinstance(steps_per_call, bool) or not isinstance(steps_per_call, int) or steps_per_call < 1:
            raise ConfigError(f"steps_per_call: expected a whole number that is at least 1, got {steps_per_call!r}")
        if steps_per_call > 1 and mode == "model":
            raise ConfigError("steps_per_call: mode='model' has no graph of a step, use mode='step'")
        if backend not in ("inductor", "eager"):
            raise ConfigError(f"backend: expected 'inductor' or 'eager', got {backend!r}")
        self._compiles = mode
        self._backend = backend
        self._steps_per_call = steps_per_call
        self._waiting, self._coming = [], deque()
        self._step = self._restored = self._epoch = self._causes = self._buffers = self._built_for = self._undo = None
        self._updates = {}
        self._is_eager = self._is_one_by_one = self._is_plain = False
        self._warned = set()
        super().__init__(*args, **kwargs)

    @property
    def graphs(self) -> int:
        """The number of compiled graphs: one per form of a batch."""
        return 0 if self._step is None else self._step.num_graphs

    def setup(self) -> None:
        """Prepare a run: nothing is compiled before the first step."""
        super().setup()
        context = self.context
        self._epoch, self._is_one_by_one = None, False
        self._is_eager = context.run.is_trial
        if context.stage == "train" and self._compiles == "step" and context.model is not None:
            self._causes = None
            if context.progress.batches == 0:
                self._restored = None
                if self._step is not None:
                    # One of many runs must compute the same bits after any other run.
                    self._step.start_run(is_among_many=context.run.is_one_of_many)

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the batches; in training, read as many at a time as one call needs."""
        batches = super().batches(stage)
        # A reason against a graph is reported by `train_step`, not here.
        if stage != "train" or self._steps_per_call == 1 or self._is_eager:
            return batches
        why_not, cause = self._ruled_out()
        if why_not is not None:
            return batches
        if cause is not None:
            self._warn_once(_ONE_BY_ONE.format(cause))
            return batches
        return self._in_calls(iter(batches))

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Make a whole update with a graph, or return the loss for an eager update."""
        context = self.context
        if not self._is_eager and self._compiles == "model":
            # All layers have changed the model by now.
            self._is_eager = True
            self._compile_model()
        if self._is_eager:
            return super().train_step(batch)
        try:
            # One of many short runs is checked once, not in every epoch.
            if self._epoch is None or (self._epoch != context.progress.epoch and not context.run.is_one_of_many):
                if context.run.is_one_of_many and cast(Trainer, context.run.trainer).num_batches("train") == 1:
                    # Its data is smaller than a batch: nearly every such run would need its own graph.
                    self._is_eager = True
                    return super().train_step(batch)
                self._step = self._prepare_step()
                self._epoch = context.progress.epoch
            assert self._step is not None
            if self._waiting:
                self._call_ahead(self._step, batch)
            output: Outputs | None
            if self._coming:
                output = self._coming.popleft()
            else:
                output = self._step(batch) if self._is_plain else self._run(self._step, batch)
        except CannotCompileError as cause:
            self._warn_once(_EAGER.format(cause))
            self._is_eager, output = True, None
            # The trace set this flag, but this batch has made no update.
            context.run.batch.optimized = False
        if output is None:
            return super().train_step(batch)
        if self._buffers is None:
            context.run.note_update(context.optimizers[0])
        context.state.update(current_batch=context.progress.batch, last_loss=output["loss"])
        return output

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Make the update with a graph, if this step has gradients outside of its graph."""
        update = self._updates.get(id(optimizer))
        if update is None or self._is_eager or update.optimizer is not optimizer:
            return super().optimizer_step(optimizer)
        try:
            if update():
                return True
        except CannotCompileError as cause:
            del self._updates[id(optimizer)]
            self._warn_once(f"updates continue without a graph: {cause}")
        return super().optimizer_step(optimizer)

    def teardown(self, error: BaseException | None) -> None:
        """Count the updates of the last call that the loop could not count because of an error, and free blocks."""
        progress, notes, number = self.context.progress, self.context.run.batch, len(self._coming)
        progress.batch += number
        progress.batches += number
        progress.updates += number
        progress.records += number * notes.num_records
        progress.tokens += sum(int(output.get("num_tokens", 0)) for output in self._coming)
        notes.is_ahead = False
        self._waiting.clear()
        self._coming.clear()
        if self._undo is not None:
            self._undo()
            self._undo = None
        super().teardown(error)

    def state_dict(self) -> dict[str, Any]:
        """Add how often each form of a batch was seen."""
        own = self._step.state_dict() if self._step is not None else dict(self._restored or {})
        return {**super().state_dict(), "compiled": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts, so that the resumed run compiles the same forms; a run that was eager tries again."""
        super().load_state_dict(state)
        check_kind({"seen": {}, "compiled": []}, state.get("compiled") or {}, "compiled")
        self._restored, self._step, self._epoch = state.get("compiled"), None, None

    def __getstate__(self) -> dict[str, Any]:
        # A copy compiles its graphs again.
        state: Any = super().__getstate__()
        fresh: dict[str, Any] = {
            "_step": None,
            "_buffers": None,
            "_updates": {},
            "_undo": None,
            "_epoch": None,
            "_waiting": [],
            "_coming": deque(),
        }
        return {**state, **fresh}

    # ------------------------------------------------------------------ private

    def _compile_model(self) -> None:
        """Compile the module, in `model` mode."""
        assert self.context.model is not None
        try:
            if self._backend == "inductor":
                check_compiler()
        except CannotCompileError as cause:
            self._warn_once(_EAGER.format(cause))
        else:
            backend = "inductor" if self._backend == "inductor" else "aot_eager"
            self._undo = compile_module(self.context.model, backend)

    def _prepare_step(self) -> WholeStep:
        """Return the compiled step for the current state of this trainer."""
        context = self.context
        self._causes = None
        cause, _ = self._ruled_out()
        if cause is not None:
            raise CannotCompileError(cause)
        assert context.model is not None
        modules = [context.model, *([self.criterion] if isinstance(self.criterion, nn.Module) else [])]
        is_split = self._split_reason() is not None
        optimizer: Optimizer = GradientBuffers(trained_by(context.optimizers)) if is_split else context.optimizers[0]
        max_norm = 0.0 if is_split else self.options.gradient_clip
        dtype = None if context.precision is None else context.precision.dtype
        built_for = max_norm, dtype, is_split
        step = self._step if built_for == self._built_for else None
        if step is not None and step.adopt(modules, optimizer):
            if self._epoch is None and not step.refresh_constants() and context.run.is_one_of_many:
                # A new graph for each of many runs would take longer than it saves.
                raise CannotCompileError(
                    "it uses a tensor that model, batch and strategies do not have in the same form"
                )
        else:
            step = self._new_step(modules, optimizer, max_norm)
        self._built_for, self._buffers = built_for, optimizer if isinstance(optimizer, GradientBuffers) else None
        self._is_plain = not is_split and context.precision is None
        self._updates = self._update_steps() if is_split else {}
        step.recheck(self._read_by_step())
        return step

    def _new_step(self, modules: list[nn.Module], optimizer: Optimizer, max_norm: float) -> WholeStep:
        context = self.context
        assert context.run.trainer is not None
        owners = (*layers(context.run.trainer), *with_parts(self.strategies))
        spaces = attribute_spaces(owners, (part for module in modules for part in module.modules()))
        spaces.append(("context.state", context.state))
        spaces += [(type(it).__name__, group) for it in context.optimizers for group in it.param_groups]
        own = (vars(it).get(name) for it in layers(context.run.trainer) for name in ("train_step", "_train_step"))
        spaces += variable_spaces((*own, self.criterion), modules)
        precision = None if context.precision is None else context.precision.dtype
        # Compiled code is rounded to a low precision less often than eager operations. Roundings are independent, so
        # 256 of them, each of at most half an epsilon, change a loss by 16 halves: eight epsilons.
        tolerance = SHARP if precision is None else max(SHARP, 8 * torch.finfo(precision).eps)
        step = WholeStep(
            self._compute_output, modules, optimizer, max_norm, spaces, self._backend, tolerance, self._describe_step
        )
        step.start_run(is_among_many=context.run.is_one_of_many)
        if self._restored:
            step.load_state_dict(self._restored)
            self._restored = None
        return step

    def _update_steps(self) -> dict[int, UpdateStep]:
        """Return the graphs of the updates, by the id of their optimizer; graphs of an earlier epoch are kept."""
        context, trainer = self.context, self._run_layer
        is_scaled = context.precision is not None and context.precision.scaler is not None
        if is_scaled or own_verb(trainer, _TRANSPARENT, "optimizer_step"):
            # A scaler, or the code of a layer, decides whether an optimizer steps.
            return {}
        known, found = self._updates, {}
        for optimizer in context.optimizers:
            update = known.get(id(optimizer))
            if update is None or update.optimizer is not optimizer:
                update = UpdateStep(optimizer, self._backend)
            found[id(optimizer)] = update
        return found

    def _run(self, step: WholeStep, batch: Any) -> Outputs | None:
        """Run the graph of a batch; if gradients leave it, make the update by the trainer's verbs."""
        context, buffers = self.context, self._buffers
        with full_precision(context.precision):
            if buffers is None:
                return step(batch)
            run, window = context.run, context.run.window
            precision = context.precision
            buffers.set_numbers(
                items=run.num_items,
                expected=window.expected,
                size=window.size,
                opens=window.opens,
                scale=None if precision is None else precision.known_scale(context.device),
            )
            if not window.opens:
                buffers.collect(trained_by(context.optimizers))
            output = step(batch)
            if output is None:
                return None
            buffers.expose(step.last_updated)
            if "num_items" in output:
                run.num_items = output["num_items"]
            if window.size > 1:
                # Counts the items of the batch; the graph has weighted its loss.
                window.weight(run.num_items, first_of_batch=True)
            run.batch.optimized = True
            context.step(zero_grad=False)
            return output

    def _read_by_step(self) -> Any:
        """Return the inputs of the step that are not tensors; None if they are unknown or need no comparison."""
        context = self.context
        assert context.run.trainer is not None
        if not context.run.is_one_of_many:
            # One check per epoch costs little, except in many runs of a few steps each.
            return None
        has_own_step = any(map(has_own_step_function, layers(context.run.trainer)))
        # The name of a loss may be registered by the user.
        if (
            has_own_step
            or own_verb(context.run.trainer, _TRANSPARENT, "train_step")
            or "loss_criterion" in context.config
        ):
            return None
        try:
            return read_by((context.model, self.criterion, self.strategies.training_step, context.config), _KNOWN)
        except UnknownError:
            return None

    def _describe_step(self) -> Any:
        """Return the inputs of the step that are not tensors, for trainers that share compiled code; None if unknown.

        Those of the parts, and the configuration, which may differ between many short runs. A module of the user counts
        as known by its code and attributes: the first loss of a graph is compared with an eager one, in each trainer.
        """
        context, options = self.context, self.options
        assert context.run.trainer is not None
        stack = list(layers(context.run.trainer))
        if any(map(has_own_step_function, stack)) or own_verb(context.run.trainer, _TRANSPARENT, "train_step"):
            return None
        if options.sample_weight or options.class_weight is not None or options.target is not None:
            return None
        precision = None if context.precision is None else context.precision.dtype
        # Values that determine the length of a run and its rates, which are inputs of the graph.
        config = {name: value for name, value in context.config.items() if name not in ("epochs", "batch_size", "lr")}
        try:
            parts, read = (context.model, self.criterion, self.strategies.training_step), partial(read_by, known=_KNOWN)
            return (list(map(type, stack)), precision, read(parts, trusts_code=True)), read(config, trusts_code=True)
        except UnknownError:
            return None

    def _in_calls(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and store all batches of a call for `train_step` before the first of them."""
        notes, plan = self.context.run.batch, self.context.run.plan
        assert plan is not None
        units = (plan.max_length, plan.validate, plan.save)
        ends = [unit for unit in units if unit is not None and not isinstance(unit, Epochs)]
        while read := self._read(batches, ends):
            # Fewer batches are not worth another graph.
            self._waiting = read if len(read) == self._steps_per_call else []
            for number in range(len(read)):
                notes.is_ahead = number + 1 < len(read)
                yield read[number]

    def _read(self, batches: Iterator[Any], ends: list[TrainUnit]) -> list[Any]:
        """Read the batches of the next call; stop at the end of a length or a period."""
        # Whether a step can be compiled is known only after the first one.
        is_single = self._is_eager or self._is_one_by_one or self._step is None
        # The tokens of a batch are known after its step.
        counts_tokens = any(isinstance(unit, Tokens) for unit in ends)
        most = 1 if is_single or counts_tokens else self._steps_per_call
        if not ends:
            return list(islice(batches, most))
        context, read = self.context, []
        assert context.run.trainer is not None
        ahead = context.progress.copy()
        for batch in islice(batches, most):
            read.append(batch)
            ahead.batches, ahead.updates = ahead.batches + 1, ahead.updates + 1
            ahead.records += context.run.trainer.batch_length(batch)
            if any(unit.due(context.run.checked, ahead) for unit in ends):
                break
        return read

    def _call_ahead(self, step: WholeStep, batch: Any) -> None:
        """Make the updates of this batch and of the waiting ones, if one graph can."""
        assert self.context.run.trainer is not None
        waiting, self._waiting = self._waiting, []
        # Moved by the outermost layer, as in the loop. The batches that the loop receives are then on the device, too.
        waiting[:] = [batch, *map(self.context.run.trainer.to_device, waiting[1:])]
        try:
            with full_precision(self.context.precision):
                self._coming.extend(step.several(waiting) or ())
        except CannotCompileError as cause:
            self._is_one_by_one = True
            self._warn_once(_ONE_BY_ONE.format(cause))

    def _ruled_out(self) -> tuple[str | None, str | None]:
        """Return the reason against a graph, and the reason against several steps per call; None means no reason."""
        # The parts of one of many short runs do not change between its epochs.
        if self._causes is None or not self.context.run.is_one_of_many:
            context, trainer, split = self.context, self._run_layer, self._split_reason()
            self._causes = (
                graph_obstacle(context, trainer, Compiled, _TRANSPARENT),
                split or single_step_reason(context, trainer, _TRANSPARENT),
            )
        return self._causes

    def _compute_output(self, batch: Any) -> Mapping[str, Any]:
        """Return the output of the inner layers' `train_step`, without its side effects on the context."""
        context = self.context
        shared = {name: context.state[name] for name in _SHARED if name in context.state}
        # The weighted loss notes the items of its batch, which are an output of the step, too.
        weighted: Any = getattr(self.core, "_weighted", None)
        items = weighted and weighted.num_items
        trainer, context.run.trainer = context.run.trainer, cast(Trainer, _NoVerbs())
        progress, context.progress = context.progress, cast(Progress, NoCounters(context.progress))
        try:
            with nullcontext() if context.precision is None else context.precision.autocast():
                return super().train_step(batch)
        finally:
            context.run.trainer, context.progress = trainer, progress
            if weighted is not None:
                weighted.num_items = items
            for name in _SHARED:
                context.state.pop(name, None)
            context.state.update(shared)

    def _split_reason(self) -> str | None:
        """Return why gradients must leave the graph before the update, or None."""
        return split_reason(self.context, self.strategies, self._run_layer, _TRANSPARENT)

    def _warn_once(self, message: str) -> None:
        """Warn, once per message."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=2)


# Layers whose verbs add nothing to an update without other processes. With others, gradients leave the graph, and
# `clip_gradients` of the data-parallel layer sends those that its `backward` did not send.
_TRANSPARENT = (Compiled, DataParallel, Timed)
_EAGER = "training continues without a graph: {}"
_ONE_BY_ONE = "steps_per_call: each call makes only one step: {}"
# Entries of `context.state` about the running batch.
_SHARED = ("current_batch", "last_loss")

# Strategies that compute from their attributes, the configuration and the batch alone.
_KNOWN = frozenset(
    {
        BCEWithLogitsLossStrategy,
        CrossEntropyLossStrategy,
        DefaultLossCriterionStrategy,
        DefaultTrainingStepStrategy,
        MSELossStrategy,
        NLLLossStrategy,
    }
)


class _NoVerbs:
    """Replaces the trainer while a step is traced: a step that calls backward or step itself raises."""

    def __getattr__(self, name: str) -> Any:
        raise CannotCompileError(f"train_step optimises by itself, by {name}")
