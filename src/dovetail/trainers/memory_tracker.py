"""Tracker of tensor memory and collective operations in a run that computes nothing."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from dovetail.distributed import Group
from dovetail.errors import ConfigError


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Replaces all tensors by tensors without data, and counts the bytes of the storages that are alive.

    Collective operations of torch's fake process group are recorded.

    Args:
        copies_messages: True to count the copies that gloo makes of the messages of a collective operation.
    """

    def __init__(self, *, copies_messages: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies_messages = copies_messages
        # The kind of new tensors.
        self.phase = "temporary"
        self.batch_bytes = 0
        # Kinds that are not in the memory of the device.
        self.host_kinds: frozenset[str] = frozenset()
        self.now: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        # Bytes by collective operation, since the last call of `clear`.
        self.sent: Counter[str] = Counter()
        self._peak = -1
        self._fake = FakeTensorMode()
        self._converted: list[Tensor] = []
        # Storages of the flags that a gradient scaler reads.
        self._overflow_flags: set[int] = set()
        # By the address of a storage: its reference, kind and bytes.
        self._storages: dict[int, tuple[Any, str, int]] = {}
        # Numbers that the host has written, by the address of a storage and the position.
        self._written: dict[int, dict[int, float]] = {}
        self._patch: Any = None
        # Places in the user's code whose results have an unknown length, which are planned at full length.
        self.full_lengths: dict[str, None] = {}

    def __enter__(self) -> MemoryTracker:
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            self._note_resize(storage._cdata, size)
            return resized

        # FSDP frees and allocates gathered blocks by this method, which is no operator.
        self._patch = _replaced(torch.UntypedStorage, "resize_", resize_and_count)
        self._patch.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _has_parts(types):
            # A DTensor calls the operator again, with its local part.
            return NotImplemented
        if active_fake_mode() is not None:
            # A DTensor computes the shape of a result, and this mode precedes its own one.
            return func(*args, **kwargs)
        if func in _READS:
            return self._read(args[0])
        if func is torch.ops.aten.equal.default:
            return True
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            # A tensor of numbers that the host knows.
            return args[0]
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

        if func is torch.ops.aten.copy_.default:
            self._note_written(args[0], args[1])
        args, kwargs = tree_map_only(Tensor, convert, (args, kwargs))
        if func is _CHECKS_OVERFLOW:
            self._overflow_flags.add(args[1].untyped_storage()._cdata)
        with self._fake:
            outputs = self._call(func, args, kwargs)
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.untyped_storage()._cdata not in self._storages:
                self.add(output, self.phase)
        self._note_collective(func, args, kwargs)
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

    def kind_of(self, tensor: Tensor) -> str | None:
        """Return the kind of a tensor's storage; None if it is not counted."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def rename(self, old: str, new: str) -> None:
        """Change the kind of all storages of a kind."""
        for key, (reference, kind, size) in self._storages.items():
            if kind == old:
                self._storages[key] = (reference, new, size)
                self.now[old] -= size
                self.now[new] += size

    def note_peak(self, extra: int = 0) -> None:
        """Store the bytes by kind if they are the most so far; `extra` bytes are copies of messages."""
        total = sum(self.now.values()) - sum(self.now[kind] for kind in self.host_kinds) + extra
        # The latest of equal moments: the state of the optimizer has its kind by then.
        if total >= self._peak:
            self._peak = total
            self.at_peak = Counter({kind: size for kind, size in self.now.items() if kind not in self.host_kinds})
            self.at_peak["temporary"] += self.at_peak.pop("update", 0)
            self.at_peak["messages"] += extra
            self.at_peak["batch"] += self.batch_bytes

    def restart(self) -> None:
        """Forget the peak so far."""
        self._peak = -1

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; a result whose length depends on values, such as that of a mask, has the full length."""
        if func is torch.ops.aten.index.Tensor and any(map(_is_mask, args[1])):
            self.full_lengths[_place()] = None
            args = args[0], [it for index in args[1] for it in (_positions(index) if _is_mask(index) else [index])]
        elif func is torch.ops.aten.masked_select.default:
            self.full_lengths[_place()] = None
            shape: Any = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch
            return args[0].new_empty(shape.numel())
        elif func is torch.ops.aten.nonzero.default:
            self.full_lengths[_place()] = None
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        try:
            return func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            raise ConfigError(
                f"plan: {_place()}: the length of the result of {func} depends on values, which a plan does not have"
            ) from error

    def _read(self, tensor: Tensor) -> float:
        """Return a number that the host wrote, or a plausible one: a finite loss, the first step, no overflow."""
        if tensor.dtype is torch.bool:
            return True
        key = tensor.untyped_storage()._cdata if isinstance(tensor, FakeTensor) else None
        if key is not None and (written := self._written.get(key)) is not None:
            return written.get(int(tensor.storage_offset()), 1.0)
        if not tensor.dtype.is_floating_point:
            return 1
        return 0.0 if key is not None and key in self._overflow_flags else 1.0

    def _note_written(self, target: Tensor, source: Tensor) -> None:
        """Store numbers that are copied from a tensor of the host: counts and flags that processes exchange."""
        is_from_host = isinstance(target, FakeTensor) and not isinstance(source, FakeTensor) and source.is_cpu
        if not is_from_host or target.ndim != 1 or target.shape != source.shape or source.numel() > _MOST_NUMBERS:
            return
        with _disable_current_modes():
            numbers = source.detach().tolist()
        known = self._written.setdefault(target.untyped_storage()._cdata, {})
        start, step = int(target.storage_offset()), int(target.stride(0))
        known.update((start + step * number, value) for number, value in enumerate(numbers))

    def _note_collective(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if func.namespace == "fsdp":
            for whole in kwargs["out"] if func is torch.ops.fsdp.split_with_sizes_copy.default else ():
                self.add(whole, "gathered")
            return
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        name = func._schema.name.partition("::")[2]
        if name == "_allgather_base_":
            self.add(args[0], "gathered")
        elif name == "_reduce_scatter_base_":
            self.add(args[1], "gathered")
            self.add(args[0], "gradients")
        operation, position = _COLLECTIVES.get(name, (None, 0))
        if operation is None:
            return
        size = sum(it.numel() * it.element_size() for it in tree_leaves(args[position]) if isinstance(it, Tensor))
        if name == "all_gather_into_tensor":
            # Its argument is one part of the result.
            size *= args[1]
        self.sent[operation] += size
        if self.copies_messages and operation in ("all_gather", "reduce_scatter"):
            self.note_peak(size)

    def _note_resize(self, key: int, size: int) -> None:
        if key in self._storages:
            reference, kind, old_size = self._storages[key]
            self._storages[key] = (reference, kind, size)
            self.now[kind] += size - old_size
            self.note_peak()

    def _remove(self, key: int) -> None:
        _, kind, size = self._storages.pop(key)
        self._written.pop(key, None)
        self.now[kind] -= size


class FakeGroup(Group):
    """A process group with one real process: messages of the others are equal to its own."""

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return this process's message for every process."""
        return [dict(message) for _ in range(self.size)]


@contextmanager
def fake_group(size: int) -> Iterator[None]:
    """Let `Group.join` connect to processes that do not exist; one process needs no group.

    Raises:
        ConfigError: This process already is in a process group.
    """
    if size == 1:
        yield
        return
    if dist.is_initialized():
        raise ConfigError("plan: this process is in a process group already; plan in a process of its own")
    # As in `Group.join`: its functions store the group that exists at the import, which would be the fake one.
    import_module("torch.distributed.nn.functional")
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh_type: Any = device_mesh.DeviceMesh
    # Torch replaces it by one that prints the rank, and never restores it.
    show_error = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with (
            _replaced(Group, "join", classmethod(lambda cls, device, place=None: FakeGroup(None))),
            _replaced(device_mesh, "init_device_mesh", _without_modes(device_mesh.init_device_mesh)),
            _replaced(mesh_type, "__init__", _without_modes(mesh_type.__init__)),
            _replaced(mesh_type, "mesh", property(_without_modes(mesh_type.mesh.fget))),
        ):
            yield
    finally:
        sys.excepthook = show_error
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    # None: the attribute is inherited.
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # The ranks of a mesh are tensors with data.
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _positions(mask: Tensor) -> list[Tensor]:
    """Return indices in place of a mask, as if it were true everywhere."""
    return [mask.new_empty(mask.numel(), dtype=torch.int64) for _ in range(mask.ndim)]


def _place() -> str:
    """Return the file and line of the running code that is neither torch's nor the library's."""
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "dovetail"):
        frame = frame.f_back
    return "a step" if frame is None else f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"


def _has_parts(types: Any) -> bool:
    # Do not import it here, as in `is_part`.
    sharding = sys.modules.get("torch.distributed.tensor")
    return sharding is not None and any(issubclass(it, sharding.DTensor) for it in types)


# The largest number of numbers from the host that are stored: a flag for each parameter, and some counts.
_MOST_NUMBERS = 100_000
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}
_CHECKS_OVERFLOW = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
# By operator: the operation, and the position of the tensors whose bytes count.
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
}
