"""Device lookup by name, and a check that this machine has the device."""

from __future__ import annotations

import sys
import weakref
from itertools import chain
from typing import Any

import torch
from torch import nn

from dovetail.accelerators import current_accelerator, is_here, numbered
from dovetail.errors import ConfigError


def as_device(device: Any, device_id: int | None = None) -> torch.device:
    """Return a device from a name, a number, a device or a list of them.

    Args:
        device: A name, a number or a device; of a list, the first is used; `"auto"` means the accelerator of this
            machine (cuda, xpu, mps, hpu or the device of an extension), or the CPU if it has none.
        device_id: Used if `device` is None: -1 means the CPU, else the accelerator with this number; None means
            `"auto"`.

    Raises:
        ConfigError: The device is unknown, or both are given and differ.

    Example:
        >>> as_device(["cpu", "cuda:1"])
        device(type='cpu')
    """
    if isinstance(device, (list, tuple)):
        if not device:
            raise ConfigError("device: expected at least one device, got an empty list")
        device = device[0]
    # -1 for the CPU is the convention of lernomatic, whose users give `device_id`.
    if device is None and device_id is not None:
        accelerator = current_accelerator()
        # Without an accelerator the error of a run names the most common one.
        kind = "cuda" if accelerator is None else accelerator.type
        return torch.device("cpu") if device_id < 0 else torch.device(kind, device_id)
    if device is None or device == "auto":
        device = current_accelerator() or "cpu"
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected a name such as 'cpu', 'cuda:0' or 'auto', got {device!r}") from error
    if device_id is not None and as_device(None, device_id) != named:
        raise ConfigError(f"device_id: device={device!r} names another device; give one or the other")
    return named


def check_device(device: torch.device, local_rank: int | None = None) -> None:
    """Raise if this machine does not have the device, which may follow from the number of a process."""
    if is_here(device):
        return
    if local_rank is None or not device.index:
        raise ConfigError(f"device: {str(device)!r} is not available here; use 'cpu' or 'auto'")
    count = torch.accelerator.device_count()
    raise ConfigError(
        f"device: {str(device)!r} is not available here: LOCAL_RANK is {local_rank}, and this process sees {count} "
        f"{'device' if count == 1 else 'devices'}; start at most one process per device on each machine, or use 'cpu'"
    )


def place_model(
    model: nn.Module, device: torch.device, memory_format: str | None, placed: weakref.ref[nn.Module] | None
) -> weakref.ref[nn.Module]:
    """Move a model to a device in the memory format of the options, and return a reference to it.

    Args:
        model: The model.
        device: The device.
        memory_format: `channels_last`, or None for no change.
        placed: The result of the last call, or None.
    """
    is_known = placed is not None and placed() is model and memory_format is None
    # In a run of a few steps, moving a model that is already in place takes as long as a batch.
    if placed is not None and is_known:
        if not torch.accelerator.is_available():
            return placed
        own = numbered(device)
        if all(it.device == own for it in chain(model.parameters(), model.buffers())):
            return placed
    check_device(device)
    if not _is_offloaded(model, device):
        model.to(device)
    if memory_format is not None:
        # Parameters remain the same objects, so the optimizers stay valid.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has no types for it alone
    return weakref.ref(model)


def _is_offloaded(model: nn.Module, device: torch.device) -> bool:
    """Return whether torch holds the shards of a model on the host, and copies them to the device itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or device.type == "cpu" or not isinstance(model, fsdp.FSDPModule):
        return False
    return any(parameter.device.type == "cpu" for parameter in model.parameters())
