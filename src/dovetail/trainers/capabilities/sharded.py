"""Sharded data-parallel training (FSDP): each process holds a part of the model and of the optimizer state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.accelerators import can_pin, widest_float
from dovetail.distributed import DataGroup, Group, is_part, num_launched, own_part, part_of, whole
from dovetail.errors import ConfigError
from dovetail.trainers.capabilities.data_parallel import DataParallel
from dovetail.trainers.capabilities.deferred import initialize, is_deferred
from dovetail.trainers.capabilities.idle import lent_batch
from dovetail.trainers.capabilities.meshes import check_mesh, check_same_mesh, mesh_sizes, show_mesh
from dovetail.trainers.capabilities.part_holders import PartHolders
from dovetail.trainers.capabilities.tensor_parallel import LocalWeights, Parallelize, check_plan, parallelize
from dovetail.trainers.capabilities.trainable import check_gradients, without_parts
from dovetail.trainers.context import Stage
from dovetail.trainers.counts import put, whole_number
from dovetail.trainers.fitting import restoring
from dovetail.trainers.randomness import rng_state, set_rng_state
from dovetail.trainers.window import positive

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Blocks = Sequence[type[nn.Module]] | Callable[[nn.Module], bool]


class ShardedDataParallel(DataParallel):
    """Trains in several processes, each of which holds a part of the weights, the gradients and the optimizer state.

    This is torch's `fully_shard` (FSDP2): a block of the model is gathered just before it computes and freed after.
    Batches, averages over samples, validation, `num_processes` and the results are the same as with `DataParallel`. In
    a checkpoint every process writes its own part; any number of processes, or one process without this layer, can
    resume from it. With one process nothing is sharded.

    All processes must call the same blocks of the model in every step.

    Args:
        shard: The modules that are gathered and freed as a whole, besides the model itself: classes of modules,
            a predicate of a module, or None for every direct child of the model that has parameters. They must be
            called as modules: a weight that is read outside of the call is sharded.
        reshard_after_forward: True to free a block between forward and backward, too, which saves memory and
            sends its weights twice; None means torch's default.
        mesh: The number of copies of the model, of parts of each copy, and of processes that compute one part together
            (tensor parallel): `{"replicate": 2, "shard": 2, "tensor": 2}` for 8 processes. One of them may be -1: all
            processes that are left. A size that is missing is 1. None means one copy, divided among all processes.
            Consecutive ranks differ in `tensor`, then in `shard`: the processes of a machine should hold one copy.
        parallelize: How the tensors of the model are divided among the processes of `tensor`: a dict of styles by
            patterns of module names (a `ParallelStyle` of torch, `"colwise"`, `"rowwise"` and so on), a function of the
            model and the `DeviceMesh` of these processes, or None for the plan that a Hugging Face model has.
        cpu_offload: True to keep shards, gradients and the optimizer's state in the memory of the host. A block is
            copied to the device when it is gathered, and the optimizer computes on the host.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(ShardedDataParallel)(torch.nn.Linear(4, 2), "cpu", num_epochs=1, verbose=False)
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))  # still one process
    """

    kind = "sharded data parallel"

    _blocks: Blocks | None
    _reshard_after_forward: bool | None
    _mesh_sizes: dict[str, int] | None
    _parallelize: Parallelize
    # Modules and names of the parameters that all processes of a tensor-parallel group hold.
    _replicas: list[tuple[nn.Module, str]]
    cpu_offload: bool
    _mesh: DeviceMesh | None
    # Pairs of each parameter before and after sharding.
    _sharded_parameters: list[tuple[Tensor, Tensor]]
    # The number of items with weight 1, chosen so that weighted losses keep about their usual size.
    _unit: float | None
    # Items of this process in the running accumulation window, without the running batch.
    _items: Any
    # Parameters whose gradients are complete, by id, since the last backward pass.
    _averaged: dict[int, Tensor]
    # Complete gradients that were not cleared before another backward pass, by the id of the parameter.
    _earlier: dict[int, Tensor]

    def __init__(
        self,
        *args: Any,
        shard: Blocks | None = None,
        reshard_after_forward: bool | None = None,
        mesh: Mapping[str, int] | None = None,
        parallelize: Parallelize = None,
        cpu_offload: bool = False,
        **kwargs: Any,
    ) -> None:
        for name in {"bucket_size", "compression"} & kwargs.keys():
            raise ConfigError(
                f"{name}: torch sends the gradients of a sharded model block by block; choose blocks with shard=…"
            )
        if shard is not None and not callable(shard) and not _are_modules(shard):
            raise ConfigError(f"shard: expected classes of modules, a function of a module, or None, got {shard!r}")
        self._blocks = shard
        self._mesh_sizes = None if mesh is None else check_mesh(mesh)
        self._parallelize, self._replicas = check_plan(parallelize), []
        if parallelize is not None and "tensor" not in (mesh or {}):
            raise ConfigError(
                "parallelize: the mesh has no 'tensor'; give mesh={'shard': -1, 'tensor': 2}, for example"
            )
        self._reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self._mesh = None
        self._sharded_parameters = []
        self._unit = None
        self._items = 0
        self._averaged, self._earlier = {}, {}
        super().__init__(*args, **kwargs)

    @property
    def shown_mesh(self) -> str:
        """The mesh as text, for `explain`; empty if the user chose no mesh."""
        return "" if self._mesh_sizes is None else show_mesh(self._mesh_sizes)

    # ------------------------------------------------------------------ once per run

    def setup(self) -> None:
        """Initialize a model that was built on the device `meta`, if one process holds all of it."""
        if num_launched() == 1 and self.context.model is not None:
            self._initialize(self.context.model)
        super().setup()

    def teardown(self, error: BaseException | None) -> None:
        """Reset the peers, so that checkpoints are again written and read by this process alone."""
        try:
            super().teardown(error)
        finally:
            self.context.process.peers = None
            self.context.run.window.rescales = True

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part during a run, else the whole state; then all processes must call this."""
        state = super().state_dict()
        is_in_parts = any(map(is_part, state["model"].values()))
        return _whole(state) if is_in_parts and self._group is None else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this process's part of a state, which may be whole or in parts."""
        model = self.context.model
        if model is not None and self._mesh is None and not any(map(_is_empty, state["model"].values())):
            # In the process that started the others: they have initialized and trained their own copies.
            self._initialize(model)
        present = {} if model is None else model.state_dict()
        with restoring("model"):
            parts = {name: part_of(value, present.get(name)) for name, value in state["model"].items()}
        super().load_state_dict({**state, "model": parts})
        for optimizer in self.context.optimizers:
            _divide_state(optimizer)

    # ------------------------------------------------------------------ once per pass

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return this process's batches; if other processes have more, it computes along with them."""
        own = super().batches(stage)
        if self._mesh is None or self._group is None or stage == "train":
            return own
        return self._reshard_after(self._with_idle_steps(self._group, own, stage))

    # ------------------------------------------------------------------ once per batch

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Compute; the blocks of the model are gathered."""
        if self._group is None:
            return super().train_step(batch)
        with self._group.noticing():
            return super().train_step(batch)

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Compute without gradients."""
        with self._computing():
            return super().test_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """Compute without gradients."""
        with self._computing():
            return super().predict_step(batch)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call backward with the loss weighted by its items; gradients are sent when an accumulation window closes."""
        group, context = self._group, self.context
        if group is None:
            super().backward(loss, **kwargs)
            return
        if self._mesh is not None:
            if kwargs.get("inputs") is not None:
                kwargs["inputs"] = without_parts(kwargs["inputs"])
            self._set_aside()
            window = context.run.window
            if window.size > 1:
                model: Any = context.model
                # Gradients are sent once per window.
                model.set_requires_gradient_sync(window.closes)
            items = window.expected if window.size > 1 else context.run.num_items
            if isinstance(items, Tensor):
                # Integer counts would be divided in float32, which is too inexact for a float64 loss.
                items = items.to(widest_float(items.device.type))
            if self._unit is None:
                self._unit = _mean(group, items) or 1.0
            # Torch sums over the processes and divides by their number; `_average` divides by the total of items.
            # An idle loss counts zero, even if it is NaN, but keeps its graph: every process takes part in backward.
            loss = loss.nan_to_num() * 0.0 if self._is_idle() else loss * (items / self._unit)
        with group.noticing():
            super().backward(loss, **kwargs)

    def after_step(self, output: Mapping[str, Any]) -> None:
        """Count the items of the window."""
        context = self.context
        super().after_step(output)
        self._items = 0 if context.run.window.closes else self._own_items()
        if context.run.window.closes:
            # The loop clears all gradients before the next batch. An assignment would be a Python call.
            self._averaged.clear()
            self._earlier.clear()

    # ------------------------------------------------------------------ private

    def _data_group(self, group: Group) -> Group:
        """Return the group in which the processes that compute the same batches count as one."""
        num_alike = mesh_sizes(self._mesh_sizes, group.size).get("tensor", 1)
        return group if num_alike == 1 else DataGroup(group, num_alike)

    def _divide(self, group: Group) -> None:
        """Shard the model over the processes, and remember which parameters replace which."""
        context, model = self.context, self.context.model
        self._unit, self._items = None, 0
        self._averaged, self._earlier = {}, {}
        if group.everyone.size == 1 or model is None:
            return
        if context.stage == "train":
            check_gradients(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule

        sizes = mesh_sizes(self._mesh_sizes, group.everyone.size)
        # An earlier run has sharded the model, and `fully_shard` accepts it only once.
        if isinstance(model, FSDPModule):
            self._mesh = _mesh_of(model)
            check_same_mesh(self._mesh, sizes)
            return
        mesh = init_device_mesh(context.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        before = dict(model.named_parameters())
        if "tensor" in sizes:
            # A plan may refer to any module, so the whole model is initialized first.
            self._initialize(model)
            if not self.cpu_offload:
                model.to(context.device)
            with torch.no_grad():
                group.copy_first([*model.parameters(), *model.buffers()])
            # One sum over both dimensions, for norms of gradients; otherwise torch makes two and warns.
            mesh["shard", "tensor"]._flatten()
            self._replicas = parallelize(model, mesh["tensor"], self._parallelize)
            # `fully_shard` appends the dimension of the tensors.
            mesh = mesh[tuple(name for name in sizes if name != "tensor")]
        self._mesh = mesh
        blocks = self._choose_blocks(model)
        if is_deferred(model):
            # Block by block: a process never holds the whole model.
            chosen = {*blocks, model}
            self._initialize(model, lambda module: self._shard(group, module) if module in chosen else None)
        else:
            for module in (*blocks, model):
                self._shard(group, module)
        self._mesh = _mesh_of(model)
        # The model is the root of its blocks, even if the first step calls blocks and not the model. Otherwise each
        # block that is called is a root: torch then rejects a later call of the model, and it does not send the
        # gradients of a window for a block that the last batch of the window does not call.
        root: Any = model
        root._get_fsdp_state()._lazy_init()
        after = dict(model.named_parameters())
        self._sharded_parameters = [(before[name], after[name]) for name in before]

    def _shard(self, group: Group, module: nn.Module) -> None:
        """Copy the values of the first process into a block, and shard it; inner blocks are sharded already."""
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

        device = self.context.device
        # Only if necessary: the parameters of a memory plan cannot be moved.
        if not self.cpu_offload and any(it.device != device for it in (*module.parameters(), *module.buffers())):
            module.to(device)
        inner = {id(it) for part in module.modules() if isinstance(part, FSDPModule) for it in part.parameters()}
        whole_ones = [it for it in (*module.parameters(), *module.buffers()) if id(it) not in inner and not is_part(it)]
        with torch.no_grad():
            # Before sharding, while every process still has whole tensors.
            group.copy_first(whole_ones)
        if self._replicas:
            # Parameters of inner blocks are replaced in the calls of these blocks.
            LocalWeights([it for it in self._replicas if it[0] in _own_modules(module)]).install(module)
        numbers = {parameter for parameter in module.parameters() if parameter.ndim == 0}
        for number in numbers:
            number.data = number.data.to(device)
        # Pinned memory is memory of the driver of an accelerator, and some have none.
        pins = can_pin(device.type)
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=self._reshard_after_forward,
            # A scalar cannot be sharded.
            ignored_params=numbers,
            offload_policy=CPUOffloadPolicy(pin_memory=pins) if self.cpu_offload else OffloadPolicy(),
        )

    def _initialize(self, model: nn.Module, finish: Callable[[nn.Module], None] = lambda module: None) -> None:
        if is_deferred(model):
            initialize(model, self.context.state["order_seed"], finish)

    def _start_alike(self, group: Group) -> None:
        context = self.context
        if self._mesh is None:
            super()._start_alike(group)
            return
        # Optimizers of an earlier run, or given as objects, still have the whole parameters.
        divided = {id(before): after for before, after in self._sharded_parameters}
        for optimizer in context.optimizers:
            replace_parameters(optimizer, divided)
            _divide_state(optimizer)
        self._sharded_parameters = []
        context.process.peers = PartHolders(group.everyone, self._mesh)
        if group is not group.everyone:
            # The processes that compute the same batches draw the same random numbers.
            set_rng_state(group.exchange({"rng": rng_state()})[group.rank]["rng"])

    def _choose_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks, inner ones before outer ones."""
        chosen = self._blocks
        if chosen is None:
            blocks = list(_children(model))
            owners = Counter(parameter for block in blocks for parameter in block.parameters())
            # Parameters that several blocks share, such as tied weights, are sharded with the model itself.
            return [block for block in blocks if all(owners[parameter] == 1 for parameter in block.parameters())]
        wanted = chosen if callable(chosen) else lambda module: isinstance(module, tuple(chosen))
        return [module for module in reversed(list(model.modules())) if module is not model and wanted(module)]

    def _with_idle_steps(self, group: Group, own: Iterable[Any], stage: Stage) -> Iterator[Any]:
        """Yield this process's batches; while others have more, compute the last batch again and drop the outputs."""
        # On the outermost layer, as the loop does with a real batch.
        trainer = self.context.run.trainer
        assert trainer is not None
        step = trainer.predict_step if stage == "predict" else trainer.test_step
        batches = iter(own)
        batch = fresh = next(batches, _END)
        have = _gather_flags(group, fresh is not _END)
        if any(have) and not all(have):
            # Fewer batches than processes: a process without one computes with another one's batch.
            lent = lent_batch(group, batch, have)
            batch = lent if batch is _END else batch
        while any(have):
            if fresh is not _END:
                yield batch
            else:
                step(trainer.to_device(batch))
            fresh = next(batches, _END)
            batch = batch if fresh is _END else fresh
            have = _gather_flags(group, fresh is not _END)

    def _reshard_after(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and afterwards reshard the blocks that are still gathered for a backward pass."""
        from torch.distributed.fsdp import FSDPModule

        try:
            yield from batches
        finally:
            assert self.context.model is not None
            for module in self.context.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _computing(self) -> AbstractContextManager[Any]:
        """Return a context for a step without gradients; a lost process is reported with its rank."""
        if self._mesh is None:
            return nullcontext()
        stack = ExitStack()
        if self._group is not None:
            stack.enter_context(self._group.noticing())
        # Weights that were gathered in inference mode could not be trained afterwards.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        return stack

    def _is_idle(self) -> bool:
        return self.context.progress.batch >= self._turn.own

    def _own_items(self) -> Any:
        return self._items if self._is_idle() else self._items + self.context.run.num_items

    def _loss_weight(self) -> Any:
        # `backward` has multiplied the loss by its items.
        return super()._loss_weight() if self._mesh is None else 1.0

    def _store_gradients(self) -> None:
        """Do nothing: the loss of an idle batch has weight zero and does not change the gradients."""
        if self._mesh is None:
            super()._store_gradients()

    def _prepare_exchanges(self, group: Group) -> None:
        """Prepare nothing for a sharded model: torch sends its gradients, and `_average` divides them."""
        if self._mesh is None:
            super()._prepare_exchanges(group)
        else:
            # Only by the items of all processes: a shard has the gradients of all of them.
            self.context.run.window.rescales = False

    def _set_aside(self) -> None:
        """Remove complete gradients before a backward pass adds incomplete ones to them; `_average` adds them again."""
        # Usually there are none, because a step clears the gradients of its optimizer.
        for key, parameter in self._averaged.items():
            if parameter.grad is not None:
                self._earlier[key], parameter.grad = parameter.grad, None
        self._averaged.clear()

    def _average(self, group: Group, optimizer: Optimizer) -> None:
        """Complete the average: backward has summed gradients that each process weighted by its own items."""
        if self._mesh is None:
            super()._average(group, optimizer)
            return
        turn, notes = self._turn, self.context.run.batch
        samples, tokens = (0, 0) if self._is_idle() else (notes.num_samples, whole_number(notes.num_tokens))
        own_sums = self._own_items(), turn.tokens + tokens
        total: Any
        extras: list[Any]
        if self.context.device.type == "cpu" or self.cpu_offload:
            numbers = *map(float, own_sums), turn.samples + samples
            (total, all_tokens, all_samples), flags = group.sum_with_events(numbers, self._flags())
            extras = [all_samples, *flags, 0, all_tokens]
        else:
            # Items and tokens may be tensors of the device, and reading them would wait for it.
            device = self.context.device
            sums = torch.zeros(2, dtype=widest_float(device.type), device=device)
            put(sums, own_sums)
            group.sum(sums)
            total, all_tokens = sums
            (all_samples,), flags = group.sum_with_events([turn.samples + samples], self._flags())
            extras = [all_samples, *flags, torch.zeros_like(all_tokens), all_tokens]
        if turn.extras is None:
            turn.extras = extras
        factor = (self._unit or 1.0) / positive(total)
        for parameter in (parameter for each in optimizer.param_groups for parameter in each["params"]):
            gradient, key = parameter.grad, id(parameter)
            # Another optimizer with the same parameter has completed its gradient.
            if gradient is None or key in self._averaged:
                continue
            if is_part(gradient):
                # Torch has summed the parts and divided by the number of processes.
                _scale(own_part(gradient), factor * group.size)
            else:
                _scale(gradient, factor)
                group.sum(gradient)
            if key in self._earlier:
                own_part(gradient).add_(own_part(self._earlier.pop(key)))
            self._averaged[key] = parameter


_END = object()


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the direct children that have parameters; a list or dict of modules is replaced by its children."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _children(child)
        elif any(True for _ in child.parameters()):
            yield child


def _own_modules(block: nn.Module) -> set[nn.Module]:
    """Return the modules of a block that are in no inner block."""
    from torch.distributed.fsdp import FSDPModule

    inner = {it for part in block.modules() if isinstance(part, FSDPModule) for it in part.modules()}
    return {*block.modules()} - inner


def _mesh_of(model: nn.Module) -> DeviceMesh:
    divided: Any = next(filter(is_part, model.parameters()))
    mesh: DeviceMesh = divided.device_mesh
    return mesh


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _are_modules(chosen: Any) -> bool:
    return isinstance(chosen, Sequence) and all(isinstance(it, type) and issubclass(it, nn.Module) for it in chosen)


def _gather_flags(group: Group, holds: bool) -> list[bool]:
    """Return the values of a flag in all processes."""
    answers = torch.zeros(group.size)
    answers[group.rank] = holds
    group.sum(answers)
    return [bool(answer) for answer in answers.tolist()]


def _mean(group: Group, number: Any) -> float:
    total = torch.tensor([float(number)], dtype=torch.float64)
    group.sum(total)
    return total.item() / group.size


def _scale(gradient: Tensor, factor: Any) -> None:
    if isinstance(factor, Tensor) or factor != 1.0:
        gradient.mul_(factor)


def replace_parameters(optimizer: Optimizer, divided: Mapping[int, Tensor]) -> None:
    """Replace parameters of an optimizer, by their ids, and keep their state."""
    for group in optimizer.param_groups:
        group["params"][:] = [divided.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in divided]:
        optimizer.state[divided[id(parameter)]] = optimizer.state.pop(parameter)


def _divide_state(optimizer: Optimizer) -> None:
    """Shard the optimizer's state of every element of a parameter in the same way as the parameter."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = part_of(value, parameter)


def _whole(state: Any) -> Any:
    """Return the same state with whole tensors, on the host."""
    if isinstance(state, Mapping):
        return {name: _whole(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)([_whole(value) for value in state])
    return whole(state).cpu() if is_part(state) else state
