"""An add-on that trains in mixed precision."""

from __future__ import annotations

from dovetail.trainers.addons.core import AddOnBase
from dovetail.trainers.capabilities import MixedPrecision


class PrecisionMixerAddon(MixedPrecision, AddOnBase):
    """Trains in mixed precision: the capability of `AMPTrainer`, mounted on a class.

    Args:
        precision: `bf16`, `fp16` or `fp32`; `auto` for the best of the device, which is `bf16` on a CPU; or a list in
            order of preference.
        init_scale: Where the scaler of float16 starts.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(PrecisionMixerAddon)(torch.nn.Linear(4, 2), "cpu", precision=["bf16", "fp16"])
        >>> trainer.predict(torch.zeros(1, 4)).dtype
        torch.bfloat16
    """
