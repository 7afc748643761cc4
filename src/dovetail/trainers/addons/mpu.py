"""Add-on for training on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.trainers.addons.core import AddOnBase
from dovetail.trainers.capabilities import DataParallel
from dovetail.trainers.devices import as_device


class MultiGPUAddon(DataParallel, AddOnBase):
    """Trains on every device of a list, one process each: `DDPTrainer` as an add-on.

    Args:
        model: A module, or a class or function that builds one.
        device: A list of devices, one process each; or one device, for `torchrun` or for this process alone.
        num_processes: The number of processes to start; None means the length of the list.
        max_restarts: How often a group that lost a process is restarted.
        sync_batchnorm: True to normalise by the batches of all processes in `nn.BatchNorm`.
        init_method: Ignored; accepted for compatibility with older code.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(MultiGPUAddon)(torch.nn.Linear(4, 2), ["cpu", "cpu"])
        >>> trainer.num_processes
        2
    """

    def __init__(
        self,
        model: Any = None,
        device: Any = None,
        *args: Any,
        num_processes: int | None = None,
        init_method: str | None = None,
        **kwargs: Any,
    ) -> None:
        # One process per device of a list. A list of one device needs no further process.
        if num_processes is None and isinstance(device, Sequence) and not isinstance(device, str) and len(device) > 1:
            num_processes = len(device)
        super().__init__(model, device, *args, num_processes=num_processes, **kwargs)
        if isinstance(device, Sequence) and not isinstance(device, str):
            self._devices = [as_device(each) for each in device]
