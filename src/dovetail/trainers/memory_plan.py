"""Memory plan of a training step: peak bytes by kind and bytes of collectives, from a run that computes nothing."""

from __future__ import annotations

import copy
import runpy
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dovetail.callbacks import Callbacks
from dovetail.distributed import is_launched, own_part
from dovetail.errors import ConfigError
from dovetail.printing import show_bytes
from dovetail.trainers.base import Trainer
from dovetail.trainers.capabilities import DataParallel, MixedPrecision, ShardedDataParallel
from dovetail.trainers.capabilities.deferred import allocate, is_deferred
from dovetail.trainers.capabilities.sharded import replace_parameters
from dovetail.trainers.decorators import TrainerDecorator
from dovetail.trainers.device_copies import batch_mover
from dovetail.trainers.memory_tracker import MemoryTracker, fake_group
from dovetail.trainers.preserve_state import layers, own_callbacks, preserve_state
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.units import Batches

_FIXED = ("parameters", "buffers", "gradients", "optimizer", "buckets")
KINDS = (*_FIXED, "batch", "activations", "temporary", "gathered", "messages")


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one process at the peak of a training step, in bytes.

    Attributes:
        kinds: The bytes at the peak, by kind: parameters, buffers, gradients, optimizer (its state), buckets (copies of
            the gradients that `DDPTrainer` sends, and the state of their compression), batch, activations (of the
            forward pass), temporary (of backward, clipping and update, with recomputed activations), gathered (the
            blocks of a sharded model that are whole at that moment, and the buffers from which they are copied and in
            which their gradients are sent) and messages (copies that gloo makes of a message).
        collectives: The bytes that a process gives to each collective operation per update; for an `all_gather`, the
            bytes of its result.
        num_processes: The number of processes.
        strategy: `one process`, `data parallel` or `sharded`.
        batch_size: Samples in the batch of one process.
        memory: The memory of a device; None if it was not given.
        notes: Sentences about what the plan does not include.
    """

    kinds: Mapping[str, int]
    collectives: Mapping[str, int] = field(default_factory=dict)
    num_processes: int = 1
    strategy: str = "one process"
    batch_size: int = 0
    memory: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The largest number of bytes that tensors occupy at one moment of a step."""
        return sum(self.kinds.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak is at most the memory of the device; None if the memory was not given."""
        return None if self.memory is None else self.peak <= self.memory

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        return {
            "peak": self.peak,
            "kinds": dict(self.kinds),
            "collectives": dict(self.collectives),
            "num_processes": self.num_processes,
            "strategy": self.strategy,
            "batch_size": self.batch_size,
            "memory": self.memory,
            "fits": self.fits,
            "notes": list(self.notes),
        }


def plan_memory(
    trainer: Trainer,
    train_data: Any = None,
    *,
    num_processes: int | None = None,
    memory: int | None = None,
    backend: Literal["gloo"] | None = None,
) -> MemoryPlan:
    """Return the peak memory of a training step, without computing it.

    Two accumulation windows run through the real loop with all layers, but with tensors that have no data. Of several
    processes the first one runs, and the others do not exist (torch's fake process group). Weights, optimizer, counters
    and random numbers do not change. Callbacks are not called, and nothing is written. Memory inside of an operator
    (workspaces), of the CUDA context and of a fragmented allocator is not included.

    Args:
        trainer: The outermost layer. Its model may be on the device `meta`.
        train_data: Training data; None means the data that the trainer already has.
        num_processes: The number of processes of a `DDPTrainer` or `FSDPTrainer`; None means its own number.
        memory: The bytes of one device, for `fits`.
        backend: "gloo" to include the copies that this backend makes of the messages of a sharded model, for processes
            on CPUs. None means a backend that makes no copies, such as NCCL.

    Raises:
        ConfigError: The trainer has no model or no data, or several processes are planned in a process group.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer(nn.Linear(1000, 10, bias=False), "cpu", verbose=False)
        >>> data = torch.zeros(64, 1000), torch.zeros(64, dtype=torch.long)
        >>> plan = plan_memory(trainer, data, memory=10**6)
        >>> plan.kinds["parameters"], plan.fits
        (40000, True)
    """
    context = trainer.context
    if context.model is None:
        raise ConfigError("plan: the trainer has no model: give it one, Trainer(model, …)")
    parallel = next((it for it in layers(trainer) if isinstance(it, DataParallel)), None)
    size = num_processes or (1 if parallel is None else parallel.num_processes) or 1
    notes = []
    if parallel is None and size > 1:
        notes.append(f"the trainer has no DDPTrainer or FSDPTrainer: it uses 1 of {size} devices")
        size = 1
    if parallel is not None and size == 1 and is_launched():
        # The plan would wait for the other processes, or send them tensors without data.
        raise ConfigError("plan: a launcher started this process for a group; give num_processes, or --gpus N")
    sharded = parallel if isinstance(parallel, ShardedDataParallel) and size > 1 else None
    tracker = MemoryTracker(copies_messages=backend == "gloo")
    if sharded is not None and sharded.cpu_offload:
        tracker.host_kinds = frozenset({"parameters", "gradients", "optimizer", "update"})
        notes.append("the shards of parameters, gradients and optimizer state are in the memory of the host")
    if sharded is not None and not is_deferred(context.model):
        whole = show_bytes(sum(map(_size, context.model.parameters())))
        notes.append(f"each process needs {whole} of the host's memory before the model is sharded")
    with preserve_state(trainer, train=train_data), _restore_tensors(trainer), _on_cpu(trainer):
        window = context.run.window.size
        batches = list(islice(trainer.batches("train"), 2 * window))
        if not batches:
            raise ConfigError("plan: the training data has no batch")
        # Two windows: the state of the optimizer exists in the second one. Each process gets every n-th batch.
        planned = [batches[number // size % len(batches)] for number in range(2 * window * size)]
        context.run.data.update(train=planned, valid=None)
        context.callbacks = Callbacks(own_callbacks(context))
        context.progress.batch = context.progress.batches = 0
        batch_size = max(map(trainer.batch_length, batches))
        tracker.batch_bytes = max(map(_bytes_of, batches))
        layer = _Phases(trainer, tracker, None if size == 1 else parallel)
        with warnings.catch_warnings(), fake_group(size), _after_warm_up(parallel, notes), _plain_lstm(), tracker:
            warnings.simplefilter("ignore")
            layer.fit(max_length=Batches(2 * window), checkpoint_period=Batches(0))
    notes += [f"{place}: a result whose length depends on values has its full length" for place in tracker.full_lengths]
    kinds = {kind: tracker.at_peak[kind] for kind in KINDS if tracker.at_peak[kind]}
    strategy = "one process" if size == 1 else "data parallel" if sharded is None else "sharded"
    return MemoryPlan(kinds, layer.collectives, size, strategy, batch_size, memory, tuple(notes))


def plan_script(
    script: Path, arguments: Sequence[str] = (), *, num_processes: int | None = None, memory: int | None = None
) -> MemoryPlan:
    """Run a script up to its first call of `fit`, plan this call instead of running it, and end the script.

    Everything before that call really happens, in this process: the script reads its data and builds its model.

    Args:
        script: The path of a Python file, which runs as `__main__`.
        arguments: The arguments of the script.
        num_processes: As for `plan_memory`.
        memory: As for `plan_memory`.

    Raises:
        ConfigError: The script ended without a call of `fit`.
    """

    def plan_instead(trainer: Trainer, entry: str, **given: Any) -> Any:
        if entry != "fit":
            return enter(trainer, entry, **given)
        # Before the plan, which calls `fit` itself.
        kind._enter = enter
        raise _Planned(plan_memory(trainer._run_layer, given["train_data"], num_processes=num_processes, memory=memory))

    # All entry points of all layers call this method of the base class.
    kind: Any = Trainer
    enter = kind._enter
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    # As `python SCRIPT` does.
    sys.path.insert(0, str(script.resolve().parent))
    kind._enter = plan_instead
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _Planned as planned:
        return planned.plan
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        kind._enter = enter
        sys.argv, sys.path[:] = before
    raise ConfigError(f"plan: {script} ended without a call of fit, so there is nothing to plan")


class _Planned(BaseException):
    """Ends a script whose first `fit` was planned. Not an `Exception`, which the script might catch.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        super().__init__("planned")
        self.plan = plan


class _Phases(TrainerDecorator):
    """The outermost layer of a plan: it knows which verb runs, and so the kind of a new tensor."""

    tracker: MemoryTracker
    parallel: DataParallel | None
    collectives: dict[str, int]
    _hooks: list[Any]
    _nodes: list[Any]
    _num_steps: int

    def __init__(self, trainer: Trainer, tracker: MemoryTracker, parallel: DataParallel | None) -> None:
        self.tracker, self.parallel, self.collectives = tracker, parallel, {}
        self._hooks, self._nodes, self._num_steps = [], [], 0
        super().__init__(trainer)

    def setup(self) -> None:
        tracker, model = self.tracker, self.context.model
        assert model is not None
        # A model on the device `meta` or on an accelerator, or in another memory format. A plan needs no values, so its
        # modules need no `reset_parameters`, and torch would give each use of a tied weight a parameter of its own when
        # it moves or converts the model.
        if allocated := allocate(model, self.core.options.memory_format):
            for optimizer in self.context.optimizers:
                # It may be on the accelerator. The first window creates it.
                optimizer.state.clear()
                replace_parameters(optimizer, allocated)
            # It is in place, and its bytes do not depend on the format.
            vars(self.core)["_placed"] = weakref.ref(model)
            vars(self.core.options)["memory_format"] = None
        super().setup()
        for parameter in model.parameters():
            tracker.add(own_part(parameter), "parameters")
            if parameter.requires_grad and not isinstance(self.parallel, ShardedDataParallel):
                self._watch(parameter)
        for buffer in model.buffers():
            tracker.add(buffer, "buffers")
        # The peak of a step, not of the setup.
        tracker.restart()

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        if self._num_steps == self.context.run.window.size:
            self.tracker.sent.clear()
        if self._num_steps == 0:
            self._note_buckets()
        self._num_steps += 1
        with self._in("activations"):
            return super().train_step(batch)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        with self._in("temporary"):
            super().backward(loss, **kwargs)
        if isinstance(self.parallel, ShardedDataParallel):
            # Inside of a window, whole gradients of all blocks stay.
            self.tracker.rename("temporary", "gradients")

    def clip_gradients(self, optimizer: Optimizer) -> None:
        with self._in("update"):
            super().clip_gradients(optimizer)
        # Compressed gradients are divided when they are averaged for the first time.
        self._note_buckets()

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        with self._in("update"):
            done: bool = super().optimizer_step(optimizer)
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, Mapping) else (state,):
                if isinstance(value, Tensor):
                    self.tracker.add(own_part(value), "optimizer")
        return done

    def after_step(self, output: Mapping[str, Any]) -> None:
        super().after_step(output)
        self.collectives = dict(self.tracker.sent)

    def teardown(self, error: BaseException | None) -> None:
        for hook in self._hooks:
            hook.remove()
        super().teardown(error)

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        before, self.tracker.phase = self.tracker.phase, phase
        try:
            yield
        finally:
            self.tracker.phase = before

    def _note_buckets(self) -> None:
        exchanges = () if self.parallel is None else self.parallel._exchanges.by_optimizer.values()
        for bucket in (bucket for exchange in exchanges for bucket in exchange.buckets):
            for tensor in (bucket.flat, *(() if bucket.codec is None else bucket.codec.tensors())):
                self.tracker.add(tensor, "buckets")

    def _watch(self, parameter: Tensor) -> None:
        """Count the gradient of a parameter as one as soon as it is complete."""

        def note(*_: Any) -> None:
            # After an average, a gradient is a part of a bucket.
            if parameter.grad is not None and self.tracker.kind_of(parameter.grad) != "buckets":
                self.tracker.add(parameter.grad, "gradients")

        # Not a hook of the parameter: `DDPTrainer` sends no gradient early that has other hooks.
        with torch.enable_grad():
            node: Any = parameter.expand_as(parameter).grad_fn
        node = node.next_functions[0][0]
        self._nodes.append(node)
        self._hooks.append(node.register_hook(note))


@contextmanager
def _plain_lstm() -> Iterator[None]:
    """Let torch compute an LSTM by plain operators.

    The operator of oneDNN stores all activations in a workspace, whose size is 0 for tensors without data.
    """
    # Not `flags`, which also sets other options, with a warning.
    onednn: Any = torch.backends.mkldnn
    before, onednn.enabled = onednn.enabled, False
    try:
        yield
    finally:
        onednn.enabled = before


@contextmanager
def _after_warm_up(parallel: DataParallel | None, notes: list[str]) -> Iterator[None]:
    """Compress the gradients of all updates, as after the first updates of a run, which may send them in full."""
    before = None if parallel is None else parallel._exchanges._compression
    if parallel is None or before is None:
        yield
        return
    after = parallel._exchanges._compression = before.after_warm_up()
    if after != before:
        notes.append(f"the messages are those after the warm-up of {before!r}")
    try:
        yield
    finally:
        parallel._exchanges._compression = before


@contextmanager
def _on_cpu(trainer: Trainer) -> Iterator[None]:
    """Plan for the CPU, because torch can neither pin tensors without data nor order their copies by streams.

    `preserve_state` restores the attributes.
    """
    context, device, core = trainer.context, trainer.context.device, trainer.core
    if device.type == "cpu" or context.model is None:
        yield
        return
    tensors = (*context.model.parameters(), *context.model.buffers())
    is_placed = any(it.device.type not in ("cpu", "meta") for it in tensors)
    context.device = torch.device("cpu")
    # They may have been built for the accelerator.
    if isinstance(core, SingleProcessTrainer):
        core._move = batch_mover(core.options.memory_format, context.device)
    if context.precision is not None:
        context.precision = context.precision.for_device("cpu")
    for layer in layers(trainer):
        if isinstance(layer, MixedPrecision):
            layer._precision = layer._get_precision().for_device("cpu")
    try:
        yield
    finally:
        # Only then: to restore the state of a model that is on the CPU, the model would be moved.
        if is_placed:
            context.device = device


@contextmanager
def _restore_tensors(trainer: Trainer) -> Iterator[None]:
    """Restore the tensors of the model, optimizers, criterion and metrics: setup may move, shard or replace them."""
    context = trainer.context
    optimizers = context.optimizers
    parts = [context.model, getattr(trainer.core, "criterion", None), *context.run.metrics.values()]
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    saved = [(module, type(module), _copy_of(module)) for module in modules]
    groups = [(optimizer, group, list(group["params"])) for optimizer in optimizers for group in optimizer.param_groups]
    try:
        yield
    finally:
        for module, kind, attributes in saved:
            # FSDP changes the class of a module and adds hooks and attributes.
            _module_state_mapping.pop(module, None)
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        for optimizer, group, parameters in groups:
            group["params"][:] = parameters
            # It belongs to other parameters. The trainer restores its state.
            optimizer.state.clear()


def _copy_of(module: nn.Module) -> dict[str, Any]:
    # The dictionaries of a module hold parameters, buffers, modules and hooks.
    return {name: copy.copy(it) if isinstance(it, dict) else it for name, it in vars(module).items()}


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of(batch: Any) -> int:
    return sum(_size(it) for it in tree_leaves(batch) if isinstance(it, Tensor))
