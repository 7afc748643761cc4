"""Memory limit of a run: the fewest blocks that are computed again, so that the planned peak fits."""

from __future__ import annotations

from typing import Any, Literal

from dovetail.errors import ConfigError
from dovetail.printing import show_bytes
from dovetail.trainers.base import Trainer
from dovetail.trainers.capabilities.recomputed import ActivationCheckpointing
from dovetail.trainers.memory_plan import MemoryPlan, plan_memory
from dovetail.trainers.preserve_state import layers


def limit_memory(
    trainer: Trainer,
    memory: int,
    train_data: Any = None,
    *,
    num_processes: int | None = None,
    backend: Literal["gloo"] | None = None,
) -> MemoryPlan:
    """Let activation checkpointing compute as few blocks again as the memory of a device allows.

    A search over plans finds the smallest number of blocks whose planned peak fits, and the layer keeps it. Nothing is
    trained.

    Args:
        trainer: The outermost layer; one of the layers is an `ActivationCheckpointTrainer`.
        memory: The bytes of one device.
        train_data: As for `plan_memory`, like `num_processes` and `backend`.
        num_processes: The number of processes.
        backend: The backend whose copies of messages are included.

    Returns:
        The plan with this number of blocks, which is `num_recomputed` of the layer.

    Raises:
        ConfigError: No layer computes blocks again, or the step does not fit with all blocks computed again.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dovetail.trainers import ActivationCheckpointTrainer, Trainer
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        >>> trainer = ActivationCheckpointTrainer(Trainer(model, "cpu", batch_size=256, verbose=False))
        >>> data = torch.zeros(256, 8), torch.zeros(256, dtype=torch.long)
        >>> limit_memory(trainer, 10**5, data).fits, trainer.num_recomputed
        (True, 0)
    """
    layer = next((it for it in layers(trainer) if isinstance(it, ActivationCheckpointing)), None)
    if layer is None:
        raise ConfigError("limit_memory: no layer computes blocks again; use ActivationCheckpointTrainer(trainer)")

    def planned(number: int) -> MemoryPlan:
        layer.num_recomputed = number
        return plan_memory(trainer, train_data, num_processes=num_processes, memory=memory, backend=backend)

    before, most = layer.num_recomputed, len(layer.possible_blocks())
    plan = planned(most)
    if not plan.fits:
        layer.num_recomputed = before
        raise ConfigError(
            f"memory: {show_bytes(memory)} is too little: with all {most} blocks computed again, a step needs "
            f"{show_bytes(plan.peak)}; use a smaller batch_size with accumulation_steps, or FSDPTrainer"
        )
    # The number of blocks that is known to fit, and one that is known not to.
    fitting, failing = most, -1
    while fitting - failing > 1:
        number = (fitting + failing) // 2
        tried = planned(number)
        if tried.fits:
            fitting, plan = number, tried
        else:
            failing = number
    layer.num_recomputed = fitting
    return plan
