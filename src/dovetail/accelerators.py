"""Accelerators of any kind through `torch.accelerator`: availability, random states, memory, precision, backends."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# Devices of every build of torch that are no accelerators.
_ALWAYS_HERE = frozenset({"cpu", "meta"})
# With one of these variables, a launcher shows a process some of the devices of its machine.
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "HABANA_VISIBLE_MODULES",
)


def current_accelerator() -> torch.device | None:
    """Return the accelerator of this machine without a number, such as cuda, xpu, mps or hpu; None if it has none.

    Example:
        >>> current_accelerator() is None or current_accelerator().type in ("cuda", "xpu", "mps", "hpu")
        True
    """
    return torch.accelerator.current_accelerator(check_available=True)


def is_here(device: torch.device) -> bool:
    """Return whether this machine has a device.

    Example:
        >>> is_here(torch.device("cpu"))
        True
    """
    if device.type in _ALWAYS_HERE:
        return True
    accelerator = current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        return (device.index or 0) < torch.accelerator.device_count()
    try:
        module: Any = torch.get_device_module(device)
    except RuntimeError:
        # No module: a device of an extension that is not imported, or that does not register a module, such as xla.
        return device.type not in ("hpu", torch._C._get_privateuse1_backend_name())
    available = getattr(module, "is_available", None)
    return available is None or bool(available())


def device_module(device_type: str) -> Any:
    """Return torch's module of a device type, such as `torch.cuda`; None if there is none."""
    try:
        return torch.get_device_module(device_type)
    except RuntimeError:
        return None


def device_names(device_type: str) -> list[str]:
    """Return the devices of a type with their numbers and, if torch reports it, the name of the product."""
    name_of = getattr(device_module(device_type), "get_device_name", None)
    names = [f"{device_type}:{number}" for number in range(torch.accelerator.device_count())]
    return names if name_of is None else [f"{name} {name_of(number)}" for number, name in enumerate(names)]


def numbered(device: torch.device) -> torch.device:
    """Return an accelerator with its number, as tensors report it; other devices unchanged.

    Example:
        >>> numbered(torch.device("cpu"))
        device(type='cpu')
    """
    # torch's type hints state that every device has a number.
    number: int | None = device.index
    accelerator = None if device.type in _ALWAYS_HERE or number is not None else current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def device_of_process(device_type: str, local_rank: int) -> torch.device:
    """Return the device of one of several processes of a machine: the one with its number.

    If a launcher shows each process only its own device, as Ray and SLURM can, this device has the number 0.

    Example:
        >>> device_of_process("cuda", 1) if torch.accelerator.device_count() > 1 else torch.device("cuda", 1)
        device(type='cuda', index=1)
    """
    has_own = any(os.environ.get(name) for name in _VISIBLE) and torch.accelerator.device_count() == 1
    return torch.device(device_type, 0 if has_own else local_rank)


@cache
def can_pin(device_type: str) -> bool:
    """Return whether copies from pinned memory to a device can run while the host continues."""
    # torch pins memory on Apple's devices, but states that copies from it are not supported.
    if device_type in ("mps", *_ALWAYS_HERE):
        return False
    try:
        return torch.empty(1).pin_memory().is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device without waiting for the device, through pinned memory.

    The host may change its own tensor afterwards, unless the tensor is in pinned memory already.
    """
    is_on_host = tensor.device.type == "cpu" and device.type != "cpu"
    if not is_on_host or tensor.layout is not torch.strided or tensor.requires_grad or not can_pin(device.type):
        return tensor.to(device)
    if not _is_dense(tensor):
        # `pin_memory` keeps the strides, which fails for an expanded tensor. A copy of a tensor with gaps blocks: CUDA
        # collects the numbers in memory that is not pinned.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills one range of memory in any order of its dimensions, each number once."""
    if tensor.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def to_host(values: list[Tensor | float]) -> list[float]:
    """Return all values as floats with one transfer for all tensors.

    Example:
        >>> to_host([torch.tensor(1.5), 2.0, torch.tensor(3)])
        [1.5, 2.0, 3.0]
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return [float(value) for value in values]
    first = tensors[0]
    # The only place where a report waits for the device.
    if all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors):
        numbers = torch.stack(tensors).tolist()
    else:
        numbers = _joined(tensors)
    if len(numbers) == len(values):
        return [float(number) for number in numbers] if not isinstance(numbers[0], float) else numbers
    fetched = iter(numbers)
    return [float(next(fetched)) if isinstance(value, Tensor) else float(value) for value in values]


def _joined(tensors: list[Tensor]) -> list[float]:
    """Return the numbers of tensors of several dtypes or devices, with one transfer."""
    # The values of a device are joined there; values of the CPU would have to be copied to it first.
    place = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    wide = widest_float(place.type)
    kinds = dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors)
    members = [[i for i, it in enumerate(tensors) if (it.device, it.dtype) == kind] for kind in kinds]
    stacked = [torch.stack([tensors[index] for index in each]).to(place, wide) for each in members]
    numbers = dict(zip((index for each in members for index in each), torch.cat(stacked).tolist(), strict=True))
    return [numbers[index] for index in range(len(tensors))]


def random_states() -> tuple[str, list[Tensor]] | None:
    """Return the type of the accelerator and the states of its generators by device number; None without them."""
    accelerator = current_accelerator()
    module = None if accelerator is None else device_module(accelerator.type)
    if accelerator is None or module is None:
        return None
    if (get_all := getattr(module, "get_rng_state_all", None)) is not None:
        return accelerator.type, list(get_all())
    # torch.mps has one device and no numbers.
    get_one = getattr(module, "get_rng_state", None)
    return None if get_one is None else (accelerator.type, [get_one()])


def set_random_states(device_type: str, states: Sequence[Tensor]) -> None:
    """Restore the states of the accelerator's generators; states of devices that this machine lacks are skipped."""
    accelerator = current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return
    module = device_module(device_type)
    if getattr(module, "get_rng_state_all", None) is None:
        if states and getattr(module, "set_rng_state", None) is not None:
            module.set_rng_state(states[0])
        return
    for number, state in enumerate(states[: torch.accelerator.device_count()]):
        module.set_rng_state(state, number)


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of the generator of one accelerator; None for other devices."""
    module = None if device.type in _ALWAYS_HERE else device_module(device.type)
    get_state = getattr(module, "get_rng_state", None)
    if get_state is None:
        return None
    # torch.mps has one device and no numbers.
    has_numbers = getattr(module, "get_rng_state_all", None) is not None
    state: Tensor = get_state(numbered(device).index) if has_numbers else get_state()
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore the state that `random_state` returned."""
    module = device_module(device.type)
    if getattr(module, "get_rng_state_all", None) is not None:
        module.set_rng_state(state, numbered(device).index)
    else:
        module.set_rng_state(state)


def free_memory(device: torch.device) -> None:
    """Return the unused memory that torch has reserved on an accelerator to the device."""
    empty_cache = getattr(device_module(device.type), "empty_cache", None)
    if empty_cache is not None and device.type not in _ALWAYS_HERE:
        empty_cache()


def peak_memory(device: torch.device, *, reset: bool = False) -> int | None:
    """Return the largest number of bytes that tensors took on an accelerator; None if torch does not count them.

    Args:
        device: The device.
        reset: Start a new measurement afterwards.
    """
    module = device_module(device.type)
    measure, start = getattr(module, "max_memory_allocated", None), getattr(module, "reset_peak_memory_stats", None)
    if measure is None or start is None or device.type in _ALWAYS_HERE:
        return None
    peak = int(measure(device))
    if reset:
        start(device)
    return peak


def device_use(device: torch.device) -> dict[str, float]:
    """Return the bytes of tensors on an accelerator, all of its memory, and its use in percent, if torch reports them.

    Example:
        >>> device_use(torch.device("cpu"))
        {}
    """
    accelerator = None if device.type in _ALWAYS_HERE else current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return {}
    found: dict[str, float] = {}
    # Backends of extensions may lack any of these.
    with suppress(Exception):
        found["device_memory"] = torch.accelerator.memory_allocated(device)
    with suppress(Exception):
        found["device_total"] = torch.accelerator.get_memory_info(device)[1]
    # Without its library, torch would raise at every call.
    if device.type == "cuda" and (torch.version.hip or find_spec("pynvml") is not None):
        with suppress(Exception):
            found["device_use"] = torch.cuda.utilization(device)
    return found


@cache
def widest_float(device_type: str) -> torch.dtype:
    """Return float64, or float32 for devices that have no float64: Apple's, Habana's, some of Intel's and others.

    Example:
        >>> widest_float("cpu"), widest_float("mps")
        (torch.float64, torch.float32)
    """
    if device_type == "xpu" and torch.xpu.is_available():
        return torch.float64 if torch.xpu.get_device_properties().has_fp64 else torch.float32
    if device_type in ("cpu", "cuda", "xpu", "mps", "hpu"):
        return torch.float32 if device_type in ("mps", "hpu") else torch.float64
    # Torch has no function that reports it for the device of an extension.
    try:
        torch.empty(0, dtype=torch.float64, device=device_type)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def supports_bfloat16(device_type: str) -> bool:
    """Return whether a device can compute in bfloat16; False if it only emulates bfloat16, as older GPUs do."""
    module = device_module(device_type)
    if (supported := getattr(module, "is_bf16_supported", None)) is not None:
        # By default torch also returns True for the emulation, which is slower than float16.
        has_choice = "including_emulation" in inspect.signature(supported).parameters
        return bool(supported(including_emulation=False) if has_choice else supported())
    if (dtypes := getattr(module, "get_amp_supported_dtype", None)) is not None:
        return torch.bfloat16 in dtypes()
    return True


def collective_backend(device_type: str) -> str:
    """Return the process group backend for the tensors of a device and of the CPU.

    Example:
        >>> collective_backend("cpu"), collective_backend("cuda")
        ('gloo', 'cpu:gloo,cuda:nccl')
    """
    # Imported here: some builds of torch have no distributed package.
    from torch.distributed import Backend

    # An extension registers its backend in this table when it is imported.
    own = Backend.default_device_backend_map.get(device_type, "gloo")
    return "gloo" if own == "gloo" else f"cpu:gloo,{device_type}:{own}"
