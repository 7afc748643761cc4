"""Add-on for mixed precision."""

from __future__ import annotations

from dovetail.trainers.addons.core import AddOnBase
from dovetail.trainers.capabilities import MixedPrecision


class PrecisionMixerAddon(MixedPrecision, AddOnBase):
    """Trains in mixed precision: `AMPTrainer` as an add-on.

    Args:
        precision: `bf16`, `fp16` or `fp32`; `auto` for the best of the device, which is `bf16` on a CPU; or a list in
            order of preference.
        init_scale: The initial loss scale for float16.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(PrecisionMixerAddon)(torch.nn.Linear(4, 2), "cpu", precision=["bf16", "fp16"])
        >>> trainer.predict(torch.zeros(1, 4)).dtype
        torch.bfloat16
    """
