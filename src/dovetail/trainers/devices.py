"""Device lookup by name, and a check that this machine has the device."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.errors import ConfigError


def as_device(device: Any, device_id: int | None = None) -> torch.device:
    """Return a device from a name, a number, a device or a list of them.

    Args:
        device: A name, a number or a device; of a list, the first is used; `"auto"` means cuda, mps or cpu.
        device_id: Used if `device` is None: -1 means the CPU, else a CUDA device; None means `"auto"`.

    Example:
        >>> as_device(["cpu", "cuda:1"])
        device(type='cpu')
    """
    if isinstance(device, (list, tuple)):
        if not device:
            raise ConfigError("device: expected at least one device, got an empty list")
        device = device[0]
    if device is None and device_id is not None:
        return torch.device("cpu") if device_id < 0 else torch.device("cuda", device_id)
    if device is None or device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected a name such as 'cpu', 'cuda:0' or 'auto', got {device!r}") from error


def check_device(device: torch.device) -> None:
    """Raise if this machine does not have the device."""
    lacks_cuda = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if lacks_cuda or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise ConfigError(f"device: {str(device)!r} is not available here; use 'cpu' or 'auto'")
