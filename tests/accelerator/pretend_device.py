"""Pretend accelerator: tensors that report the device `pretend:0`, are computed on the CPU, and record every transfer.

    with PretendDevice() as device:
        Trainer(model, "pretend").fit(batches)
    device.events    # copies between host and device, and values that the host read

The numbers are the CPU's, bit for bit, because the same kernels compute them. An operation that mixes tensors of the
device and of the CPU raises, as on a real device. So does an operator whose stream has not waited for the stream that
writes its inputs (`pretend_streams.py`). The device has its own random generators, pinned memory and autocast. It
counts the bytes of its tensors as an allocator does. It has no compiler.

Import this module before the first backward pass of a process: torch's engine counts devices once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pretend_streams import Origin, PretendEvent, PretendStream, count_operator, current_stream, installed, use_stream
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
NUM_DEVICES = 2

_aten = torch.ops.aten
_CPU = torch.device("cpu")
# The result is a value for the host, or its shape depends on values, so the host waits for the device.
_READS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.repeat_interleave.Tensor,
    # On cuda it reads the largest number, to find the size of the result.
    _aten.bincount.default,
}
_VALUES = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}


@dataclass(frozen=True)
class Event:
    """A transfer between host and device.

    Attributes:
        kind: `to_device`, `to_host`, `read` or `wait`.
        waits: True if the host waits for the device: it reads a value, a copy is not from or to pinned memory, or it
            synchronizes with a stream, an event or the device.
        cause: The operator.
        after: The number of operators that the device was given before.
    """

    kind: str
    waits: bool
    cause: str
    after: int


class _Log:
    """State of the device: events, counters, pinned memory and generators."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.num_operations = 0
        self.recorded_streams = 0
        self.warns = False
        self.reports_waits = True
        self.has_float64 = True
        # Kept, so that their addresses stay theirs.
        self.pinned: list[Tensor] = []
        # Bytes of the storages that are alive, by their address, and the most so far.
        self.storages: dict[int, tuple[Any, int]] = {}
        self.allocated = self.peak = 0
        self.current = 0
        self.generators = [torch.Generator() for _ in range(NUM_DEVICES)]

    def note(self, kind: str, cause: Any, *, waits: bool) -> None:
        self.events.append(Event(kind, waits, str(cause), self.num_operations))
        if waits and self.warns:
            warnings.warn(f"called a synchronizing operation: {cause}", stacklevel=2)

    def note_memory(self, inner: Tensor) -> None:
        storage = inner.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            self.storages[key] = weakref.ref(storage, lambda _: self._forget_memory(key)), size
            self.allocated += size
            self.peak = max(self.peak, self.allocated)

    def _forget_memory(self, key: int) -> None:
        self.allocated -= self.storages.pop(key)[1]

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        blocks = ((it.data_ptr(), it.untyped_storage().nbytes()) for it in self.pinned)
        return any(start <= address < start + max(size, 1) for start, size in blocks)


_log = _Log()


class _Module:
    """The functions that torch expects in `torch.pretend`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return _log.current

    def set_device(self, device: Any) -> None:
        _log.current = torch.device(device).index or 0

    Stream, Event = PretendStream, PretendEvent
    current_stream, stream = staticmethod(current_stream), staticmethod(use_stream)

    def set_sync_debug_mode(self, mode: str) -> None:
        # torch shows it once, or always if the user has asked for all warnings.
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=2,
        )
        _log.warns = mode == "warn" and _log.reports_waits

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def max_memory_allocated(self, device: Any = None) -> int:
        return _log.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _log.peak = _log.allocated

    def manual_seed_all(self, seed: int) -> None:
        for generator in _log.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: int = 0) -> Tensor:
        return _log.generators[device].get_state()

    def set_rng_state(self, state: Tensor, device: int = 0) -> None:
        _log.generators[device].set_state(state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [generator.get_state() for generator in _log.generators]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


@contextmanager
def emulated_bfloat16() -> Iterator[None]:
    """Report that the device supports bfloat16 only by emulation, as `torch.cuda` does for a T4."""
    module: Any = torch.get_device_module(NAME)
    module.is_bf16_supported = lambda including_emulation=True: including_emulation
    try:
        yield
    finally:
        del module.is_bf16_supported


class PretendTensor(Tensor):
    """A tensor that reports the pretend device and holds a tensor of the CPU."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        if inner.dtype is torch.float64 and not _log.has_float64:
            raise TypeError(f"cannot convert a tensor of {NAME} to float64, which the device does not support")
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, _log.current),
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inside = inner
        self.origin = Origin()
        _log.note_memory(inner)

    def untyped_storage(self) -> Any:
        # Sharded models resize it.
        return self.inside.untyped_storage()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented if _is_foreign(types) else _dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        _log.note("read", "tolist", waits=True)
        return self.inside.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        _log.note("read", "repr", waits=True)
        return f"PretendTensor({self.inside!r})"


class PretendDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the device usable for new tensors and pinned memory while it is active, and records its transfers.

    Args:
        reports_waits: False for a device whose sync debug mode reports nothing.
        has_float64: False for a device that rejects tensors in float64, as Apple's and Habana's devices do.
    """

    def __init__(self, *, reports_waits: bool = True, has_float64: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _log.reports_waits = reports_waits
        self._streams = ExitStack()
        self._has_float64 = has_float64

    def __enter__(self) -> PretendDevice:
        _log.events.clear()
        _log.pinned.clear()
        _log.recorded_streams = 0
        _log.has_float64 = self._has_float64
        self._streams.enter_context(installed(lambda cause: _log.note("wait", cause, waits=True)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._streams.close()
        _log.has_float64 = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if _is_foreign(types) else _dispatch(func, args, kwargs or {})

    @property
    def events(self) -> list[Event]:
        """The transfers so far."""
        return _log.events

    @property
    def num_operations(self) -> int:
        """The number of operators that the device was given."""
        return _log.num_operations

    @property
    def recorded_streams(self) -> int:
        """How often a tensor was recorded as used by a stream."""
        return _log.recorded_streams


def _is_foreign(types: Any) -> bool:
    """Return whether another subclass handles the operator first: a `DTensor`, which holds tensors of the device."""
    return any(issubclass(it, Tensor) and it not in (Tensor, nn.Parameter, PretendTensor) for it in types)


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
    mine = [it for it in tensors if isinstance(it, PretendTensor)]
    plain = [it for it in tensors if not isinstance(it, PretendTensor)]
    target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if not mine and target != NAME:
        return _on_host(func, args, kwargs)
    if mine and kwargs.get("dtype") is torch.float64 and not _log.has_float64:
        raise TypeError(f"{func}: a tensor of {NAME} cannot be converted to float64, not even while it is copied")
    if mine and func is _aten._pin_memory.default:
        raise RuntimeError(f"cannot pin a tensor of {NAME}: only dense tensors of the CPU can be pinned")
    if func is _aten.record_stream.default:
        _log.recorded_streams += 1
        mine[0].origin.users.add(args[1].stream_id)
        return None
    for tensor in mine:
        tensor.origin.check_use(func)
    count_operator()
    _note_transfers(func, args, kwargs, mine, plain, target)
    _log.num_operations += 1
    inner_kwargs = {name: _CPU if name == "device" and target == NAME else it for name, it in kwargs.items()}
    # Memory of the device is never pinned.
    inner_kwargs.pop("pin_memory", None)
    with _randomness(func, inner_kwargs):
        out = func(*tree_map(_inner, tuple(args)), **tree_map(_inner, inner_kwargs))
    if func is _aten.copy_.default:
        if isinstance(args[0], PretendTensor):
            args[0].origin = Origin(is_copy=not isinstance(args[1], PretendTensor))
        return args[0]
    if target == "cpu":
        _keep_pinned(kwargs, out)
        return out
    if func in _VALUES:
        return out
    wrapped = _wrapped(func, args, mine, out)
    if func is _aten._to_copy.default and plain:
        wrapped.origin.is_copy = True
    return wrapped


def _on_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operator of the CPU, whose memory can be pinned for the device."""
    if func is _aten.is_pinned.default:
        return _log.is_pinned(args[0])
    if func is _aten._pin_memory.default:
        _log.pinned.append(_copied_with_strides(args[0]))
        return _log.pinned[-1]
    wants_pinned = kwargs.pop("pin_memory", False)
    out = func(*args, **kwargs)
    if wants_pinned:
        _log.pinned.append(out)
    return out


def _copied_with_strides(tensor: Tensor) -> Tensor:
    """Return a copy as ATen pins it: with the same sizes and strides, so the copy of an expanded tensor raises."""
    size = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(size if tensor.numel() else 0, dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _copies_at_once(tensor: Tensor) -> bool:
    """Return whether a tensor is pinned and has no gaps. CUDA copies a tensor with gaps through pageable memory."""
    return _log.is_pinned(tensor) and bool(_aten.is_non_overlapping_and_dense.default(tensor))


def _keep_pinned(kwargs: dict[str, Any], out: Any) -> None:
    # Torch copies to pinned memory if a copy to the host does not block.
    if kwargs.get("non_blocking"):
        _log.pinned.append(out)


def _note_transfers(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], mine: list[Any], plain: list[Tensor], target: str | None
) -> None:
    if func in _READS or (func is _aten.index.Tensor and any(_is_mask(it) for it in args[1])):
        _log.note("read", func, waits=True)
    elif func is _aten._to_copy.default and mine and target == "cpu":
        _log.note("to_host", func, waits=not kwargs.get("non_blocking"))
    elif func is _aten._to_copy.default and plain:
        is_async = kwargs.get("non_blocking") and _copies_at_once(plain[0])
        _log.note("to_device", func, waits=not is_async)
    elif func is _aten.copy_.default and mine and plain:
        to_device = isinstance(args[0], PretendTensor)
        is_async = len(args) > 2 and args[2] and _copies_at_once(plain[0])
        _log.note("to_device" if to_device else "to_host", func, waits=not is_async)
    elif func is _aten._foreach_copy_.default:
        # As torch does for lists of several devices: one copy after the other.
        for pair in zip(args[0], args[1], strict=True):
            own = [it for it in pair if isinstance(it, PretendTensor)]
            _note_transfers(
                _aten.copy_.default,
                (*pair, *args[2:]),
                {},
                own,
                [it for it in pair if not isinstance(it, PretendTensor)],
                None,
            )
    elif func not in _COPIES and mine and any(it.dim() for it in plain):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {NAME}:0 and cpu")


def _is_mask(index: Any) -> bool:
    return isinstance(index, PretendTensor) and index.dtype in (torch.bool, torch.uint8)


def _inner(value: Any) -> Any:
    return value.inside if isinstance(value, PretendTensor) else value


def _wrapped(func: Any, args: Sequence[Any], mine: list[Any], out: Any) -> Any:
    returns = func._schema.returns
    if returns and all(it.alias_info is not None and it.alias_info.is_write for it in returns):
        formal = func._schema.arguments
        written = [it for it, arg in zip(args, formal, strict=False) if arg.alias_info and arg.alias_info.is_write]
        written = written or mine
        for each in tree_leaves(written):
            each.origin = Origin()
        return written[0] if len(returns) == 1 else tuple(written)
    wrap: Callable[[Any], Any] = lambda it: (  # noqa: E731
        PretendTensor(it) if isinstance(it, Tensor) and not isinstance(it, PretendTensor) else it
    )
    return tree_map(wrap, out)


@contextmanager
def _randomness(func: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Draw the random numbers of an operator from the generator of the device."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        yield
        return
    own, host = _log.generators[_log.current], torch.get_rng_state()
    torch.set_rng_state(own.get_state())
    yield
    own.set_state(torch.get_rng_state())
    torch.set_rng_state(host)


# Autocast: the part of the CPU's lists that tiny models need.
_LOW = (_aten.linear.default, _aten.matmul.default, _aten.mm.default, _aten.addmm.default, _aten.bmm.default)
_FULL = (_aten.cross_entropy_loss.default, _aten.nll_loss.default, _aten.mse_loss.default)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")  # type: ignore[no-untyped-call]

# Every other operator computes in the precision of its inputs.
_others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
_others.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]


def _autocast(func: Any, dtype_of: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of()

        def cast(it: Any) -> Any:
            is_float = isinstance(it, PretendTensor) and it.is_floating_point() and it.dtype != torch.float64
            return it.to(dtype) if is_float else it

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return func(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


for _func in _LOW:
    _library.impl(_func, _autocast(_func, lambda: torch.get_autocast_dtype(NAME)))  # type: ignore[no-untyped-call]
for _func in _FULL:
    _library.impl(_func, _autocast(_func, lambda: torch.float32))  # type: ignore[no-untyped-call]
