"""Memory plan of a training step: peak bytes by kind and bytes of collectives, from a run that computes nothing."""

from __future__ import annotations

import runpy
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from dovetail.callbacks import Callbacks
from dovetail.errors import ConfigError
from dovetail.printing import show_bytes
from dovetail.trainers.base import Trainer
from dovetail.trainers.capabilities import DataParallel, ShardedDataParallel
from dovetail.trainers.capabilities.deferred import is_deferred
from dovetail.trainers.capabilities.sharded import replace_parameters
from dovetail.trainers.decorators import TrainerDecorator
from dovetail.trainers.preserve_state import layers, own_callbacks, preserve_state
from dovetail.units import Batches

_FIXED = ("parameters", "buffers", "gradients", "optimizer", "buckets")
KINDS = (*_FIXED, "batch", "activations", "temporary", "gathered")


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one process at the peak of a training step, in bytes.

    Attributes:
        kinds: The bytes at the peak, by kind: parameters, buffers, gradients, optimizer (its state), buckets (copies of
            the gradients that `DDPTrainer` sends), batch, activations (of the forward pass), temporary (of backward,
            clipping and update, with recomputed activations) and gathered (the blocks of a sharded model that are
            whole at that moment).
        collectives: The bytes that a process gives to each collective operation per update.
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
    trainer: Trainer, train_data: Any = None, *, num_processes: int | None = None, memory: int | None = None
) -> MemoryPlan:
    """Return the peak memory of a training step, without computing it.

    Two accumulation windows run through the real loop with all layers, but with tensors that have no data. Weights,
    optimizer, counters and random numbers do not change. Callbacks are not called, and nothing is written. Memory
    inside of an operator (workspaces), of the CUDA context and of a fragmented allocator is not included.

    Args:
        trainer: The outermost layer. Its model may be on the device `meta`.
        train_data: Training data; None means the data that the trainer already has.
        num_processes: The number of processes of a `DDPTrainer` or `FSDPTrainer`; None means its own number.
        memory: The bytes of one device, for `fits`.

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
    sharded = parallel if isinstance(parallel, ShardedDataParallel) and size > 1 else None
    if sharded is not None and (sharded._mesh_sizes or {}).get("tensor", 1) != 1:
        raise ConfigError(
            "plan: the memory of a mesh with 'tensor' cannot be planned yet; plan the same trainer without 'tensor'"
        )
    tracker = _Tracker(size if sharded is not None else 1)
    if sharded is not None and sharded.cpu_offload:
        tracker.host_kinds = frozenset({"parameters", "gradients", "optimizer", "update"})
        notes.append("the shards of parameters, gradients and optimizer state are in the memory of the host")
    with preserve_state(trainer, train=train_data), _restore_tensors(context.model):
        window = context.run.window.size
        batches = list(islice(trainer.batches("train"), 2 * window))
        if not batches:
            raise ConfigError("plan: the training data has no batch")
        # Two windows: the state of the optimizer exists in the second one.
        context.run.data.update(train=[batches[number % len(batches)] for number in range(2 * window)], valid=None)
        context.callbacks = Callbacks(own_callbacks(context))
        context.progress.batch = context.progress.batches = 0
        batch_size = max(map(trainer.batch_length, batches))
        if parallel is not None and sharded is None and size > 1:
            tracker.now["buckets"] = sum(_size(it) for it in context.model.parameters() if it.requires_grad)
        tracker.batch_bytes = max(map(_bytes_of, batches))
        layer = _Phases(trainer, tracker, sharded)
        with warnings.catch_warnings(), tracker:
            warnings.simplefilter("ignore")
            layer.fit(max_length=Batches(2 * window), checkpoint_period=Batches(0))
    if sharded is not None:
        notes.append("blocks that torch gathers ahead, and gradients that it still sends, are not included")
        if not is_deferred(context.model):
            whole = show_bytes(sum(map(_size, context.model.parameters())))
            notes.append(f"each process needs {whole} of the host's memory before the model is sharded")
    kinds = {kind: tracker.at_peak[kind] for kind in KINDS if tracker.at_peak[kind]}
    collectives = _collectives(tracker, size, parallel, window)
    strategy = "one process" if size == 1 else "data parallel" if sharded is None else "sharded"
    return MemoryPlan(kinds, collectives, size, strategy, batch_size, memory, tuple(notes))


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


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces all tensors by tensors without data, and counts the bytes of the storages that are alive.

    Args:
        num_shards: The number of processes that share parameters, gradients and the optimizer's state.
    """

    def __init__(self, num_shards: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_shards = num_shards
        self.phase = "temporary"
        self.batch_bytes = 0
        # Kinds that are not in the memory of the device.
        self.host_kinds: frozenset[str] = frozenset()
        self.now: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self.gradient_bytes = self.gathered_twice = self.gathered_once = 0
        self._peak = -1
        self._fake = FakeTensorMode()
        self._converted: list[Tensor] = []
        # Storages of the flags that a gradient scaler reads.
        self._overflow_flags: set[int] = set()
        # By the address of a storage: its reference, kind and bytes.
        self._storages: dict[int, tuple[Any, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            return self._read(args[0])
        if func is torch.ops.aten.equal.default:
            return True
        real: dict[int, Tensor] = {}

        def convert(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            fake = self._fake.from_tensor(tensor)
            real[id(fake)] = tensor
            key = fake.untyped_storage()._cdata
            if key not in self._storages:
                # A batch, which is counted once, or a constant.
                self.add(fake, "batch", 0)
            return fake

        args, kwargs = tree_map_only(Tensor, convert, (args, kwargs or {}))
        if func is _CHECKS_OVERFLOW:
            self._overflow_flags.add(args[1].untyped_storage()._cdata)
        with self._fake:
            outputs = func(*args, **kwargs)
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.untyped_storage()._cdata not in self._storages:
                size = output.untyped_storage().nbytes()
                # The update of a shard needs a part of the memory.
                self.add(output, self.phase, size // self.num_shards if self.phase == "update" else size)
        self.note_peak()
        # An operation in place must return the caller's tensor.
        return tree_map_only(Tensor, lambda it: real.get(id(it), it), outputs)

    def add(self, tensor: Tensor, kind: str, size: int | None = None) -> None:
        """Count the storage of a tensor, or change its kind and bytes."""
        # Without this mode, which would count the conversion.
        with _disable_current_modes():
            fake = tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)
        if fake is not tensor:
            # The conversion is cached only while its result is in use.
            self._converted.append(fake)
        storage = fake.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if size is None else size
        if key in self._storages:
            reference, old_kind, old_size = self._storages[key]
            self.now[old_kind] -= old_size
        else:
            reference = weakref.ref(storage, lambda _: self._remove(key))
        self._storages[key] = (reference, kind, size)
        self.now[kind] += size

    def note_peak(self, extra: int = 0) -> None:
        """Store the bytes by kind if they are the most so far; `extra` bytes are temporary."""
        total = sum(self.now.values()) - sum(self.now[kind] for kind in self.host_kinds) + extra
        # The latest of equal moments: the state of the optimizer has its kind by then.
        if total >= self._peak:
            self._peak = total
            self.at_peak = Counter({kind: size for kind, size in self.now.items() if kind not in self.host_kinds})
            self.at_peak["temporary"] += self.at_peak.pop("update", 0) + extra
            self.at_peak["batch"] += self.batch_bytes

    def restart(self) -> None:
        """Forget the peak so far."""
        self._peak = -1

    def part(self, tensor: Tensor) -> int:
        """Return the bytes of one process's shard of a parameter, which is divided by rows."""
        if not tensor.ndim or self.num_shards == 1:
            return tensor.numel() * tensor.element_size()
        rows = -(-tensor.shape[0] // self.num_shards)
        return rows * (tensor.numel() // max(1, tensor.shape[0])) * tensor.element_size()

    def _read(self, tensor: Tensor) -> float:
        """Return a value for a number that the host reads: a finite loss, the first step, one item, no overflow."""
        if tensor.dtype is torch.bool:
            return True
        if not tensor.dtype.is_floating_point:
            return 1
        is_overflow = isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata in self._overflow_flags
        return 0.0 if is_overflow else 1.0

    def _remove(self, key: int) -> None:
        _, kind, size = self._storages.pop(key)
        self.now[kind] -= size


class _Phases(TrainerDecorator):
    """The outermost layer of a plan: it knows which verb runs, and so the kind of a new tensor."""

    tracker: _Tracker
    sharded: ShardedDataParallel | None
    _hooks: list[Any]
    _moved: list[tuple[Tensor, Tensor]]

    def __init__(self, trainer: Trainer, tracker: _Tracker, sharded: ShardedDataParallel | None) -> None:
        self.tracker, self.sharded, self._hooks, self._moved = tracker, sharded, [], []
        super().__init__(trainer)

    def setup(self) -> None:
        tracker, model = self.tracker, self.context.model
        assert model is not None
        before = list(model.parameters())
        super().setup()
        parameters = list(model.parameters())
        # A model without data on the device `meta` has other parameters after it was moved.
        self._moved = [(old, new) for old, new in zip(before, parameters, strict=True) if old is not new]
        self._replace({id(old): new for old, new in self._moved})
        for parameter in parameters:
            tracker.add(parameter, "parameters", tracker.part(parameter))
        for buffer in model.buffers():
            tracker.add(buffer, "buffers")
        tracker.gradient_bytes = sum(map(_size, filter(_is_trained, parameters)))
        if self.sharded is None:
            for parameter in filter(_is_trained, parameters):
                self._watch(parameter, self._note_gradient)
        else:
            self._watch_blocks(model)
        # The peak of a step, not of the setup.
        tracker.restart()

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        with self._in("activations"):
            return super().train_step(batch)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        with self._in("temporary"):
            super().backward(loss, **kwargs)

    def clip_gradients(self, optimizer: Optimizer) -> None:
        with self._in("update"):
            super().clip_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        with self._in("update"):
            done: bool = super().optimizer_step(optimizer)
        for parameter, state in optimizer.state.items():
            for value in state.values() if isinstance(state, Mapping) else (state,):
                if isinstance(value, Tensor):
                    is_part = value.shape == parameter.shape
                    self.tracker.add(value, "optimizer", self.tracker.part(value) if is_part else None)
        return done

    def teardown(self, error: BaseException | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._replace({id(new): old for old, new in self._moved})
        super().teardown(error)

    def _replace(self, parameters: Mapping[int, Tensor]) -> None:
        for optimizer in self.context.optimizers if parameters else ():
            replace_parameters(optimizer, parameters)

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        before, self.tracker.phase = self.tracker.phase, phase
        try:
            yield
        finally:
            self.tracker.phase = before

    def _watch(self, parameter: Any, hook: Callable[[Tensor], None]) -> None:
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _note_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.tracker.add(parameter.grad, "gradients")

    def _watch_blocks(self, model: nn.Module) -> None:
        """Count the blocks of a sharded model while they are gathered, and their gradients until they are sent."""
        assert self.sharded is not None
        owned: set[Tensor] = set()
        reshards = self.sharded._reshard_after_forward
        for module in (*self.sharded._choose_blocks(model), model):
            own = [it for it in module.parameters() if it not in owned and it.ndim]
            owned.update(own)
            is_root = module is model
            block = _Block(self, own, frees=not is_root if reshards is None else reshards)
            self._hooks.append(module.register_forward_pre_hook(block.gather))
            self._hooks.append(module.register_forward_hook(block.free_after_forward))
            for parameter in filter(_is_trained, own):
                self._watch(parameter, block.note_gradient)
            size = sum(map(_size, own))
            if block.frees:
                self.tracker.gathered_twice += size
            else:
                self.tracker.gathered_once += size


class _Block:
    """A block of a sharded model.

    Args:
        layer: The layer of the plan.
        parameters: The parameters that are gathered together.
        frees: True if the block is freed after its forward.
    """

    def __init__(self, layer: _Phases, parameters: Sequence[Tensor], *, frees: bool) -> None:
        self.frees = frees
        self._layer, self._parameters = layer, parameters
        self._size = sum(map(_size, parameters))
        self._num_trained = sum(map(_is_trained, parameters))
        self._num_done = 0
        self._is_gathered = False

    def gather(self, *_: Any) -> None:
        tracker = self._layer.tracker
        if not self._is_gathered:
            self._is_gathered = True
            # The shards arrive in one flat tensor and are copied into the parameters.
            tracker.note_peak(2 * self._size)
            tracker.now["gathered"] += self._size

    def free_after_forward(self, *_: Any) -> None:
        if self.frees:
            self._free()

    def note_gradient(self, parameter: Tensor) -> None:
        self.gather()
        assert parameter.grad is not None
        tracker = self._layer.tracker
        # Whole until it is sent.
        tracker.add(parameter.grad, "gathered")
        self._num_done += 1
        if self._num_done < self._num_trained:
            return
        self._num_done = 0
        self._free()
        if self._layer.context.run.window.closes:
            # The gradients are copied into one flat tensor, which is summed over the processes.
            tracker.note_peak(self._size)
            for each in self._parameters:
                if each.grad is not None:
                    tracker.add(each.grad, "gradients", tracker.part(each))

    def _free(self) -> None:
        if self._is_gathered:
            self._is_gathered = False
            self._layer.tracker.now["gathered"] -= self._size


def _collectives(tracker: _Tracker, size: int, parallel: DataParallel | None, window: int) -> dict[str, int]:
    if size == 1:
        return {}
    if not isinstance(parallel, ShardedDataParallel):
        return {"all_reduce": tracker.gradient_bytes}
    gathered = 2 * tracker.gathered_twice + tracker.gathered_once
    return {"all_gather": gathered * window, "reduce_scatter": tracker.gradient_bytes}


@contextmanager
def _restore_tensors(model: nn.Module) -> Iterator[None]:
    """Restore the parameters and buffers of a model: setup may move them, and would replace them by empty ones."""
    saved = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, parameters, buffers in saved:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of(batch: Any) -> int:
    return sum(_size(it) for it in tree_leaves(batch) if isinstance(it, Tensor))


_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}
_CHECKS_OVERFLOW = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
